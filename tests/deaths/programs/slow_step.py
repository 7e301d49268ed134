"""One step takes so long that it looks like a hang; then it goes on and ends well."""

import time

import stage

stage.steps()
stage.ready()
time.sleep(2.5)
stage.steps()
time.sleep(0.5)
