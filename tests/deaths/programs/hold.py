"""Holds so many MiB and waits: high usage is no proof of anything."""

import sys

import stage

held = b"x" * (int(sys.argv[1]) << 20)
stage.ready()
