"""Writes to shared memory that /dev/shm has no room for."""

import mmap
import os

import stage

with open("/dev/shm/deaths-mapped", "w+b") as file:
    file.truncate(64 << 20)
    mapped = mmap.mmap(file.fileno(), 0)
os.unlink("/dev/shm/deaths-mapped")
stage.ready()
for offset in range(0, 64 << 20, 4096):
    mapped[offset] = 1
