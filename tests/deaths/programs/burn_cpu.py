"""Burns CPU time against RLIMIT_CPU (soft, hard); `ignore` leaves only the hard limit.

`late` sets it at the cue: less than a second of its life is left to notice it.
"""

import resource
import signal
import sys

import stage

if "ignore" in sys.argv:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
if "late" in sys.argv:
    stage.ready()
resource.setrlimit(resource.RLIMIT_CPU, tuple(map(int, sys.argv[1:3])))
stage.ready()
while True:
    pass
