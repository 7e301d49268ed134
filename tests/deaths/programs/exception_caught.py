"""Catches exceptions, even shows one through the hook, and goes on: old news at its death."""

import sys

import stage

try:
    {}["missing"]
except KeyError:
    sys.excepthook(*sys.exc_info())
stage.ready()
