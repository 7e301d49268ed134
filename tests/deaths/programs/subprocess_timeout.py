"""Kills its own slow subprocess (that is what `timeout=` does) and does not catch the exception."""

import subprocess
import sys

import stage

stage.ready()
subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], timeout=1.5)
