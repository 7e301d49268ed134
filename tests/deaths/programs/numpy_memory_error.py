"""numpy is refused memory."""

import stage  # isort: skip
import numpy

stage.ready()
numpy.ones((1 << 20, 1 << 20))
