"""Divides by zero in C."""

import ctypes

import stage

stage.ready()
ctypes.CDLL(None).div(1, 0)
stage.wait("never")
