"""Makes files until the file system has no room for names; bytes are free."""

import itertools
import os
import sys

import stage

stage.ready()
for number in itertools.count():
    with open(os.path.join(sys.argv[1], f"shard-{number}"), "wb"):
        pass
