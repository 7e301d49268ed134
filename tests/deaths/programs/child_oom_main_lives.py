"""Its subprocess is killed for memory; it notices, goes on and ends well."""

import os
import subprocess
import sys
import time

import stage

stage.ready()
child = subprocess.run([sys.executable, "-c", "held = [b'x' * (8 << 20) for _ in range(999)]"])
if child.returncode != -9:
    os._exit(99)
time.sleep(0.5)
