"""Writes to a pipe nobody reads, with the default action of SIGPIPE restored (as `cat` has)."""

import os
import signal

import stage

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reader, writer = os.pipe()
os.close(reader)
stage.ready()
os.write(writer, b"x")
