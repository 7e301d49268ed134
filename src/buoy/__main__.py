"""`python -m buoy` is the `buoy` command."""

import sys

from buoy.cli import main

sys.exit(main())
