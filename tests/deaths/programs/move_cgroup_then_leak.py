"""Is moved into another memory group after the recording began, and dies there."""

import os
import sys
import time

import stage

stage.say("before-move")
time.sleep(0.3)
with open(os.path.join(sys.argv[1], "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
stage.ready()
held = []
while True:
    held.append(b"x" * (2 << 20))
    time.sleep(0.01)
