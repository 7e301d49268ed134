"""Unmodified Keras scripts for the planner's tests, written to files and planned from there."""

from __future__ import annotations

HEAD = """
import keras, numpy as np, tensorflow as tf
x, y = np.zeros((96, 64), "float32"), np.zeros(96, "int64")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""

FIT = (
    HEAD
    + """
import buoy.keras
model.compile("adam", loss_of)
model.fit(x, y, batch_size=32, callbacks=[buoy.keras.Guard("runs/fit")])
open("trained", "w").close()
"""
)

LOOP = (
    HEAD
    + """
import buoy.keras
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
FUNCTION
def train_step(a, b):
    with tf.GradientTape() as tape:
        loss = loss_of(b, model(a, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
loop = buoy.keras.Loop("runs/loop", save=1)
loop.track(model=model, optimizer=optimizer)
for epoch in loop.epochs(1):
    for a, b in loop.batches(tf.data.Dataset.from_tensor_slices((x, y)).batch(32)):
        train_step(a, b)
        open("trained", "w").close()
"""
)

# As GANs are written: no `call`, and optimizers beside the one that Keras makes.
OWN_STEP = (
    HEAD
    + """
class Two(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = keras.Sequential(model.layers[:1]), keras.Sequential(model.layers[1:])
        self.first.build((None, 64)), self.last.build((None, 256))
    def compile(self, one, other):
        super().compile()
        self.one, self.other = one, other
    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(data[1], self.last(self.first(data[0])))
        for optimizer, part in ((self.one, self.first), (self.other, self.last)):
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}
two = Two()
two.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
two.fit(x, y, batch_size=32)
open("trained", "w").close()
"""
)
