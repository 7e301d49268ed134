"""Takes a step every 20 ms until told to stop."""

import time

import stage

stage.steps(10)
stage.say("ready")
while not stage.said("go"):
    stage.steps(10, lambda: time.sleep(0.02))
