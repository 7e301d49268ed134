"""Frees the same block twice; the C library notices and aborts."""

import ctypes

import stage

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
block = ctypes.c_void_p(libc.malloc(2000))
stage.ready()
libc.free(block)
libc.free(block)
stage.wait("never")
