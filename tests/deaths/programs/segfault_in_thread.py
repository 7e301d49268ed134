"""Reads address 0 in a second thread."""

import ctypes
import threading

import stage

stage.ready()
threading.Thread(target=ctypes.string_at, args=(0,)).start()
stage.wait("never")
