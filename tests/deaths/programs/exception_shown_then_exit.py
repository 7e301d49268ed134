"""Shows an exception that it caught, goes on, and leaves later with a code of its own choice."""

import sys

import stage

try:
    {}["missing"]
except KeyError:
    sys.excepthook(*sys.exc_info())
stage.ready()
sys.exit(int(sys.argv[1]))
