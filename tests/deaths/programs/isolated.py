"""Run by `python -I`: nothing can be brought in from outside, so it does without the stage."""

import os
import sys
import time

ready = os.path.join(sys.argv[1], "ready")
with open(f"{ready}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{ready}.part", ready)
while not os.path.exists(os.path.join(sys.argv[1], "go")):
    time.sleep(0.005)
if sys.argv[2:]:
    import ctypes

    ctypes.string_at(0)
raise ValueError("nobody takes a note of this")
