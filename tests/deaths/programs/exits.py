"""Ends itself in one of the ways a program can."""

import os
import sys

import stage

how, code = sys.argv[1:]
stage.ready()
if how == "os._exit":
    os._exit(int(code))
if how == "message":
    sys.exit(code)
if how == "sys.exit":
    sys.exit(int(code))
