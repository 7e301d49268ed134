"""Keeps every TensorFlow tensor it makes."""

import stage  # isort: skip
import tensorflow

held = []
stage.ready()
while True:
    held.append(tensorflow.ones([1 << 22]))
