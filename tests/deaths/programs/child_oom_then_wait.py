"""Holds most of the memory itself; its child is killed for want of it, and it goes on."""

import os
import subprocess
import sys

import stage

held = b"x" * (int(sys.argv[1]) << 20)
leak = "open('/proc/self/oom_score_adj', 'w').write('1000'); held = [b'x' * (4 << 20) for _ in range(999)]"
child = subprocess.run([sys.executable, "-c", leak])
if child.returncode != -9:
    os._exit(99)
stage.ready()
