"""Recurses in C until the stack ends."""

import faulthandler

import stage

stage.ready()
faulthandler._stack_overflow()
