"""Runs a command and leaves with its code, as `conda run` and many a launcher do."""

import subprocess
import sys

sys.exit(subprocess.call(sys.argv[1:]))
