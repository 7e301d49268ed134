"""Keras steps as graphs: what is alive when, in which order, and what the graph cannot tell."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.estimate.child import EstimateError, Request, trace
from buoy.estimate.devices import by_id
from buoy.estimate.result import PER_OPERATION, estimate
from buoy.estimate.trace import Trace
from buoy.estimate.tracing.graph import Graph, Node, live_peak, to_trace

BUILDS = Path(__file__).parent / "keras_builds.py"
CHANNELS = 64 * 32 * 32 * 32 * 4


def chain(*kinds: str) -> Graph:
    """Operations of 1000 bytes, each reading the one before."""
    nodes = [Node("x", "Placeholder", [], [], ["x:0"], [1000])]
    for number, kind in enumerate(kinds):
        nodes.append(Node(f"n{number}", kind, [nodes[-1].outputs[0]], [], [f"n{number}:0"], [1000]))
    return Graph(nodes)


def test_a_chain_keeps_two_buffers_and_elementwise_steps_reuse_one() -> None:
    products, elementwise = chain("MatMul", "MatMul", "MatMul"), chain("MatMul", "Relu", "Tanh")

    assert live_peak(products, products.creation_order()) == 2000
    assert live_peak(elementwise, elementwise.creation_order()) == 1000


def test_other_names_for_a_buffer_cost_nothing() -> None:
    graph = chain("MatMul", "Reshape", "Identity", "Squeeze")

    assert live_peak(graph, graph.creation_order()) == 1000


def test_the_order_decides_how_much_is_alive() -> None:
    """Two products of one input, each consumed at once or only at the end."""
    nodes = [Node("x", "Placeholder", [], [], ["x:0"], [1000])]
    nodes += [Node(f"wide{n}", "MatMul", ["x:0"], [], [f"wide{n}:0"], [1000]) for n in range(4)]
    nodes += [Node(f"thin{n}", "MatMul", [f"wide{n}:0"], [], [f"thin{n}:0"], [1]) for n in range(4)]
    graph = Graph(nodes)

    eager = [0, 1, 5, 2, 6, 3, 7, 4, 8]
    assert live_peak(graph, graph.creation_order()) >= 4000
    assert live_peak(graph, eager) <= 1004
    assert sorted(graph.data_flow_order()) == graph.creation_order()


def test_variables_stand_before_the_step() -> None:
    found = to_trace(chain("MatMul"), weights=[100, 200], state=[600])

    assert [size for _, _, size in found.events[:3]] == [100, 200, 600]
    assert [found.label(number)[0] for number in range(3)] == ["weights", "weights", "optimizer"]


def test_what_nothing_depends_on_is_never_run() -> None:
    """Gradients of constants, for one: TensorFlow drops them before it runs the step."""
    graph = chain("MatMul", "MatMul")
    graph = Graph([*graph.nodes, Node("unused", "Square", ["n0:0"], [], ["unused:0"], [5000])])

    kept = graph.needed(["n1"])

    assert [node.name for node in kept.nodes] == ["x", "n0", "n1"]
    assert live_peak(kept, kept.creation_order()) == 2000 < live_peak(graph, graph.creation_order())


def test_what_must_run_before_is_kept_too() -> None:
    nodes = [Node("before", "Assign", [], [], [], []), Node("end", "NoOp", [], ["before"], [], [])]

    assert len(Graph(nodes).needed(["end"]).nodes) == 2


def test_on_a_cpu_tensorflow_keeps_more_than_its_tensors() -> None:
    """Regions it has touched, and memory for each operation of the step."""
    few, many = (
        Trace([("a", 0, 64 << 20)], facts={"engine": "graph", "operations": n}) for n in (100, 20_000)
    )

    small, large = (estimate(found, by_id("cpu")) for found in (few, many))
    assert small.replay.peak_allocated == 64 << 20
    assert small.total.likely > 1.2 * (64 << 20)
    assert (
        large.total.likely - small.total.likely
        == 19_900 * PER_OPERATION
        == large.parts["context"] - small.parts["context"]
    )
    assert large.verdict(large.total.high) == "fits"
    assert large.verdict(large.total.low) == "tight"
    assert large.verdict(large.total.low - (1 << 20)) == "does not fit"


def test_a_step_compiled_for_the_cpu_is_hardly_bounded() -> None:
    facts = {"operations": 10}
    plain, compiled = (
        estimate(Trace([("a", 0, 64 << 20)], facts={**facts, "engine": engine}), by_id("cpu")).allocated
        for engine in ("graph", "xla")
    )

    assert plain.high == pytest.approx(1.2 * plain.likely)
    assert compiled.high == 3 * compiled.likely


@pytest.fixture(scope="module")
def tensorflow() -> None:
    if importlib.util.find_spec("tensorflow") is None:  # the child imports it, this process need not
        pytest.skip("TensorFlow is not installed")


def traced(name: str, **options: object) -> estimate:  # type: ignore[valid-type]
    request = Request("keras", {"build": f"{BUILDS}:{name}"}, **options)  # type: ignore[arg-type]
    return estimate(trace(request, timeout=180, memory=6 << 30), by_id("t4"), allocator="bfc")


@pytest.mark.usefixtures("tensorflow")
def test_a_keras_step_is_estimated_with_a_wide_interval_and_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('not installed here', name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    figure = traced("images")

    weights = 3 * 3 * 3 * 32 + 32 + 4 * 32 + 16 * 16 * 32 * 10 + 10
    trainable = weights - 2 * 32
    assert 4 * weights <= figure.parts["weights"] <= 4 * weights + 64  # metrics and seeds are variables, too
    assert 8 * trainable <= figure.parts["optimizer"] <= 8 * trainable + 64
    assert figure.parts["activations"] >= CHANNELS  # what the convolution made, kept for its backward
    assert figure.allocated.high >= 1.3 * figure.allocated.likely
    assert figure.trace.facts["operations"] > 100
    # Keras decides by the devices it sees whether XLA compiles; here it sees none, on a T4 it would.
    assert any("XLA compiles this step" in note and "jit_compile=False" in note for note in figure.notes)


@pytest.mark.usefixtures("tensorflow")
def test_what_a_loop_keeps_is_not_guessed() -> None:
    with pytest.raises(EstimateError, match="contains a loop"):
        traced("recurrent")


@pytest.mark.usefixtures("tensorflow")
def test_a_keras_model_is_rebuilt_for_inputs_of_half_the_side_or_length() -> None:
    script = Path(__file__).parent / "keras_smaller.py"
    root = script.parents[2]
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "images": [[None, 16, 16, 3], [64, 16, 16, 3], [64], "Adam"],
        "nested": [[None, 32, 32, 3], [4, 32, 32, 3], [4, 5], "SGD"],
        "segmentation": [[None, 32, 32, 3], [4, 32, 32, 3], [4, 32, 32, 1], "Adam"],
        "tokens": [[None, 10], [4, 10], [4, 1], "Adam"],
        "features": "the inputs have no side or length",
    }
