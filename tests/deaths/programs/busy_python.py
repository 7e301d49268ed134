"""Runs in a circle in Python."""

import stage

stage.steps()
stage.ready()
while True:
    pass
