"""Has finished, but hangs in the last steps of its shutdown (say, an upload)."""

import atexit


def upload():
    stage.ready()


atexit.register(upload)

import stage  # noqa: E402
