"""Becomes another program: same pid, other words."""

import os
import sys

import stage

stage.say("first-life")
os.execv(sys.executable, [sys.executable, os.path.join(os.path.dirname(__file__), sys.argv[1])])
