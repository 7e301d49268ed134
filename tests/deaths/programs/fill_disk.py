"""Writes checkpoints into a folder until its file system is full."""

import os
import sys

import stage

stage.ready()
with open(os.path.join(sys.argv[1], "checkpoint.bin"), "wb", buffering=0) as file:
    while True:
        file.write(b"x" * 65536)
