"""Raises ENOSPC as the kernel does when inotify watches or semaphores run out: the disk has room."""

import errno
import os

import stage

stage.ready()
raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
