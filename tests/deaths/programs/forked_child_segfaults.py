"""A forked child crashes and is waited for; the parent goes on."""

import ctypes
import os

import stage

child = os.fork()
if child == 0:
    ctypes.string_at(0)
os.waitpid(child, 0)
stage.ready()
