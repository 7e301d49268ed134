"""Writes a file larger than RLIMIT_FSIZE allows; `SIGXFSZ` restores the default action of that signal."""

import os
import resource
import signal
import sys

import stage

path = os.path.join(stage.FOLDER, "large.bin")
stage.ready()
# Only now: the recorder's own files are small, and it is another process's limit anyway.
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if "SIGXFSZ" in sys.argv else signal.SIG_IGN)
with open(path, "wb", buffering=0) as file:
    while True:
        file.write(b"x" * 65536)
