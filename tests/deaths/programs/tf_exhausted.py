"""TensorFlow is refused memory on the CPU."""

import stage  # isort: skip
import tensorflow

stage.ready()
tensorflow.zeros([1 << 40])
