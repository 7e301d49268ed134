"""Its subprocess is killed for memory and that is dealt with; later it dies of a bug of its own."""

import os
import subprocess
import sys
import time

import stage

stage.ready()
child = subprocess.run([sys.executable, "-c", "held = [b'x' * (8 << 20) for _ in range(999)]"])
if child.returncode != -9:
    os._exit(99)
time.sleep(1.0)
{}["no such column"]
