"""Runs in C with the interpreter lock held, so that no Python code can run."""

import stage

stage.steps()
stage.ready()
(3 ** (1 << 22)) ** (1 << 12)
