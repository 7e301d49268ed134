"""Burns CPU time against RLIMIT_CPU (soft, hard); `ignore` leaves only the hard limit.

`late` sets it at the cue: less than a second of its life is left to notice it. A single number: so many threads burn
CPU time against the limit of whoever started this.
"""

import resource
import signal
import sys
import threading

import stage


def burn():
    import hashlib

    while True:
        hashlib.sha256(bytes(1 << 22))  # outside of the GIL


if "ignore" in sys.argv:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
if "late" in sys.argv:
    stage.ready()
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_CPU, tuple(map(int, sys.argv[1:3])))
stage.ready()
for _ in range(int(sys.argv[1]) - 1 if len(sys.argv) == 2 else 0):
    threading.Thread(target=burn).start()
burn() if len(sys.argv) == 2 else None
while True:
    pass
