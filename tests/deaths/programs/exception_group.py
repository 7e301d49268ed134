"""Several exceptions at once."""

import stage

stage.ready()
raise ExceptionGroup("two workers failed", [ValueError("first"), KeyError("second")])
