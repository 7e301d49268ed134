"""Run by `python -I`: nothing can be brought in from outside, so it does without the stage."""

import os
import sys
import time

with open(os.path.join(sys.argv[1], "ready"), "w") as file:
    file.write(str(os.getpid()))
while not os.path.exists(os.path.join(sys.argv[1], "go")):
    time.sleep(0.005)
raise ValueError("nobody takes a note of this")
