"""Leaves a child behind and ends well, as daemons do."""

import os
import time

import stage

stage.ready()
if os.fork() == 0:
    time.sleep(1)
    os._exit(0)
