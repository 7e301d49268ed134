"""Raises the real error of an exceeded quota; no file system here has quotas."""

import errno
import os

import stage

stage.ready()
raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/someone/checkpoint.bin")
