"""A cell that fills the session and takes no step, in real kernels: warned of, drawn, and told after the restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel, html
from tests.processes import buoy, wait_until

LIMIT = 1500 << 20
FILL = f"""
def used():
    line = next(line for line in open("GROUP/memory.stat") if line.startswith("total_rss "))
    return int(line.split()[1])

import time
def fill():
    while used() < 0.965 * {LIMIT}:
        yield
    time.sleep(WAIT)
"""
KERAS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy, tensorflow as tf

def images():
    for _ in fill():
        yield numpy.ones(1 << 20, "uint8")

spec = tf.TensorSpec((1 << 20,), tf.uint8)
ds = tf.data.Dataset.from_generator(images, output_signature=spec).cache().shuffle(50_000).batch(8)
ds = ds.map(lambda pixels: (tf.cast(pixels[:, :64], tf.float32), tf.cast(pixels[:, :1], tf.float32)))
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(loss="mse")
"""
LIST = """
rows = []
for _ in fill():
    rows.append("x" * (1 << 20) + str(len(rows)))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    kernels: list[Kernel] = []

    def begin() -> Kernel:
        kernels.append(Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython")))
        return kernels[-1]

    yield begin
    for kernel in kernels:
        kernel.end()


def in_a_session(kernel: Kernel, group: Path, seconds: float) -> None:
    (group / "cgroup.procs").write_text(str(kernel.pid))
    kernel.run("%load_ext buoy")
    kernel.run(FILL.replace("GROUP", str(group)).replace("WAIT", str(seconds)))


def test_a_fit_that_never_comes_to_its_first_step_is_drawn_and_its_pipeline_named_after_the_restart(
    make_session: Callable[[int], Path], start: Callable[[], Kernel], tmp_path: Path
) -> None:
    kernel = start()
    in_a_session(kernel, make_session(LIMIT), 600)
    kernel.run(KERAS)
    shown = kernel.shown_until("model.fit(ds, verbose=0)", lambda item: "shuffle(50000) of ds" in str(item))
    alive = buoy("why", "runs/notebook", cwd=tmp_path).stdout
    os.kill(kernel.pid, signal.SIGTERM)  # as a restart does
    wait_until((tmp_path / "runs/notebook/attempts/0001/verdict.json").exists, "the verdict")
    card = html(start().run("%load_ext buoy"))

    drawn = [item for item in shown if item["kind"] in ("display_data", "update_display_data")]
    assert len([item for item in drawn if item["kind"] == "display_data"]) == 1
    text = drawn[-1]["data"]["text/plain"]
    assert "no step yet" in text and "RAM has been at" in text and "for 1" in text
    assert "are outside Python objects, where tf.data keeps the elements of" in text

    assert "It is still running. RAM has been at 9" in alive and "no step was ever" in alive.replace(
        "\n           ", " "
    )

    assert "<b>terminated</b>" in card
    assert "RAM had been at 9" in card and "no step was ever counted (certain)" in card
    assert "cache() of ds and shuffle(50000) of ds keep their elements in RAM" in card.replace(
        "shuffle(50000) of ds and cache() of ds", "cache() of ds and shuffle(50000) of ds"
    )
    assert "outside Python objects, where tf.data keeps the elements of" in card


def test_a_cell_that_trains_nothing_is_drawn_once_it_was_warned_of_and_left_alone_before(
    make_session: Callable[[int], Path], start: Callable[[], Kernel]
) -> None:
    kernel = start()
    in_a_session(kernel, make_session(LIMIT), 16)
    quiet = kernel.run("time.sleep(7)")
    shown = kernel.run(LIST)

    assert quiet == []
    cards = [item for item in shown if item["kind"] == "display_data"]
    assert len(cards) == 1 and "RAM has been at" in cards[0]["data"]["text/plain"]
    assert shown[-1]["kind"] == "update_display_data"
    assert "Memory is held by rows (list of 1," in shown[-1]["data"]["text/plain"]
