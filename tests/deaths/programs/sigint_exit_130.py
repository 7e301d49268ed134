"""Answers Ctrl-C as shells expect: with code 130."""

import sys

import stage

try:
    stage.ready()
except KeyboardInterrupt:
    sys.exit(130)
