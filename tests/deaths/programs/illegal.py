"""Runs an instruction that does not exist (x86: ud2)."""

import ctypes
import mmap

import stage

page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\x0f\x0b")
call = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
stage.ready()
call()
