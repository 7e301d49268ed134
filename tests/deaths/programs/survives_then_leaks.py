"""Survives a SIGTERM and even an exception that it shows; later it runs out of memory."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, lambda *_: None)

import stage  # noqa: E402

try:
    {}["missing"]
except KeyError:
    sys.excepthook(*sys.exc_info())
stage.ready()
held = []
while True:
    held.append(b"x" * (2 << 20))
    time.sleep(0.02)
