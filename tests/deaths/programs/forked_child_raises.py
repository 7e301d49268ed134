"""A forked child dies of an exception and is waited for; the parent goes on."""

import os

import stage

child = os.fork()
if child == 0:
    raise ValueError("only the child")
os.waitpid(child, 0)
stage.ready()
