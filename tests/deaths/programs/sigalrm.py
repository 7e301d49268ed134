"""Its own alarm goes off, and nobody handles it."""

import signal

import stage

stage.ready()
signal.alarm(1)
stage.wait("never")
