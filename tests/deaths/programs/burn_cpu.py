"""Burns CPU time against RLIMIT_CPU (soft, hard); `ignore` leaves only the hard limit."""

import resource
import signal
import sys

import stage

stage.ready()
resource.setrlimit(resource.RLIMIT_CPU, tuple(map(int, sys.argv[1:3])))
if "ignore" in sys.argv:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    pass
