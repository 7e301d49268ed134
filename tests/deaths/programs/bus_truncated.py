"""Reads a mapped file that somebody made shorter."""

import mmap
import os

import stage

path = os.path.join(stage.FOLDER, "mapped.bin")
with open(path, "wb") as file:
    file.truncate(1 << 20)
with open(path, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
stage.ready()
os.truncate(path, 0)
mapped[1 << 19]
