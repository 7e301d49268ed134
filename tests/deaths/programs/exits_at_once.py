"""Is over before anyone could look."""

import os
import sys

os._exit(int(sys.argv[1]))
