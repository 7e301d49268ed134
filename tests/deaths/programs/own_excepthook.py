"""Has its own way of printing exceptions, as many frameworks do."""

import sys

import stage

sys.excepthook = lambda kind, value, traceback: sys.stderr.write(f"oh no: {value}\n")
stage.ready()
raise ValueError("the labels are wrong")
