"""Had its own SIGTERM handler before it was watched; saves for longer than it is given."""

import signal
import time

signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))

import stage  # noqa: E402

stage.ready()
