"""Leaks so many MiB every so many seconds."""

import sys
import time

import stage

chunk, pause = int(sys.argv[1]) << 20, float(sys.argv[2])
stage.ready()
held = []
while True:
    held.append(b"x" * chunk)
    time.sleep(pause)
