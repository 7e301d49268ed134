"""Asks for a GiB at once and writes to all of it."""

import stage

stage.ready()
held = b"x" * (1 << 30)
stage.wait("never")
