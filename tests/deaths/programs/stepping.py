"""Takes a step every 20 ms until told to stop."""

import stage

stage.steps(10)
stage.say("ready")
while not stage.said("go"):
    stage.steps(10, 0.02)
