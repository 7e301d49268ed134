"""Reads address 0."""

import ctypes

import stage

stage.ready()
ctypes.string_at(0)
