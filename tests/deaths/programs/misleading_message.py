"""A plain bug whose message speaks of other deaths."""

import stage

stage.ready()
raise ValueError("unknown label 'Killed: out of memory, No space left on device' in row 7 of deaths.csv")
