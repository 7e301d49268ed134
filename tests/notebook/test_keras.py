"""Keras in a real kernel: `%buoy profile` around an ordinary `fit`, and what `%buoy plan` would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.notebook.kernels import Kernel, html

BUILD = """
import buoy, keras, numpy, tensorflow, time
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(4)])
slow = tensorflow.data.Dataset.range(40).map(
    lambda i: (tensorflow.ensure_shape(tensorflow.numpy_function(
        lambda i: (time.sleep(0.005), numpy.ones(64, "float32"))[1], [i], "float32"), (64,)), i % 4))
nothing_ahead = tensorflow.data.Options()
nothing_ahead.autotune.enabled = nothing_ahead.experimental_optimization.apply_default_optimizations = False
nothing_ahead.experimental_optimization.inject_prefetch = False
train_data = slow.batch(8).with_options(nothing_ahead)
"""
ASK = """
from buoy.errors import UsageError
from buoy.notebook.namespace import find
try:
    find(globals(), {})
except UsageError as error:
    print(error)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
print(find(globals(), {}).words)
"""
VALIDATED = """
model.fit(train_data, epochs=2, verbose=0, validation_data=train_data, callbacks=[buoy.keras.Guard('runs/other')]);
"""
LOOP = """
def train():
    loop = buoy.keras.Loop('runs/loop')
    pixels = numpy.zeros(5_000_000, 'uint8')
    loop.track(model=model)
    for epoch in loop.epochs(1):
        for x, y in loop.batches(train_data):
            model(x)
            time.sleep(0.03)
train()
"""
FIT = "model.fit(train_data, epochs={epochs}, verbose=0, callbacks=[buoy.keras.Guard('runs/lines', save=3)]);"


def text(shown: list[dict[str, Any]]) -> str:
    return "".join(item.get("text", "") for item in shown)


def phases(told: str) -> tuple[dict[str, float], dict[str, float]]:
    """Percent, and milliseconds per step, by phase."""
    lines = [line for line in told.splitlines() if line[26:28] == " %"]
    return (
        {line[2:20].strip(): float(line[21:26]) for line in lines},
        {
            line[2:20].strip(): float(line.split()[-2]) * (1 if line.endswith("ms") else 1000)
            for line in lines
        },
    )


def test_a_fit_is_profiled_between_its_batches_and_trains_on(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython"), TF_CPP_MIN_LOG_LEVEL="3")
    kernel.run("%load_ext buoy")
    refused = html(kernel.run("%buoy profile many"))
    kernel.run(BUILD)
    asked = text(kernel.run(ASK))
    announced = html(kernel.run("%buoy profile 3"))
    told = text(kernel.run(FIT.format(epochs=1)))
    kernel.run("%buoy profile 1000")
    short = text(kernel.run(FIT.format(epochs=2)))
    later = text(kernel.run(FIT.format(epochs=3)))
    kernel.run("%buoy profile 1000")
    validated = text(kernel.run(VALIDATED))
    kernel.run("%buoy profile 2")
    looped = text(kernel.run(LOOP))
    kernel.end()

    assert "takes a number of steps" in refused
    assert "`model` is not compiled yet" in asked
    assert "['model `model` as it is compiled', 'batches of 8 as `train_data` makes them']" in asked
    assert "3 steps of the next training" in announced
    assert "3 steps, " in told
    assert "(after 2 steps of warm-up)" in told
    shares, spent = phases(told)
    assert spent["data wait"] >= 8 * 5  # what each sample of a batch sleeps, and nothing is made ahead
    assert 99 < sum(shares.values()) < 101
    assert "parameters" in told
    assert list(tmp_path.glob("runs/lines/profiles/*/plugins/profile/*/*.xplane.pb"))
    assert "3 steps, " in short  # of the five in this epoch
    assert "the loop ended before the 1000 asked for" in short
    assert "steps, " not in later
    # The validation itself, however long, is not recorded.
    assert "; the loop ended before the 1000 asked for" in validated
    shares, spent = phases(looped)
    assert list(spent) == ["data wait", "step"]
    assert spent["data wait"] >= 8 * 5
    assert spent["step"] >= 30
    assert "4.8 MiB  pixels (NumPy array, " in looped
