"""Sits at its cue for ever: whatever ends it comes from outside."""

import stage

stage.ready()
