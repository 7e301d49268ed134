"""An array that costs nothing until its pages are touched."""

import stage  # isort: skip
import numpy

array = numpy.zeros(1 << 27)
stage.ready()
array[::512] = 1.0
stage.wait("never")
