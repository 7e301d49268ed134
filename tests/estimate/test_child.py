"""Tracing happens in a child process: what it finds comes back, what goes wrong comes back in words, nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from buoy.estimate.child import LIVE, EstimateError, Request, explain, trace
from buoy.estimate.devices import by_id
from buoy.estimate.result import estimate
from buoy.estimate.trace import Trace
from tests.processes import alive, wait_until

pytest.importorskip("torch")
BUILDS = Path(__file__).parent / "builds.py"


def traced(name: str, timeout: float = 120, memory: int = 4 << 30, **options: object) -> Trace:
    return trace(Request("torch", {"build": f"{BUILDS}:{name}"}, **options), timeout=timeout, memory=memory)  # type: ignore[arg-type]


def refused(name: str, **options: object) -> EstimateError:
    with pytest.raises(EstimateError) as error:
        traced(name, **options)  # type: ignore[arg-type]
    return error.value


def test_an_ordinary_build_function_is_traced_as_it_is() -> None:
    """Values read while building, `.cuda()`, `torch.compile`, an optimizer over the model's parameters: all usual."""
    found = traced("plain")

    parameters = 100 * 4000 + 4000 + 4000 * 10 + 10
    parts = estimate(found, by_id("t4")).parts
    assert found.facts["parameters"] == parameters
    assert parts["weights"] == 4 * parameters
    assert parts["optimizer"] == 4 * parameters
    assert any("compiled" in note for note in found.notes)


def test_weights_are_never_allocated() -> None:
    """16 GiB of weights are traced within 2 GiB of memory."""
    found = traced("large", memory=2 << 30)

    assert estimate(found, by_id("t4")).parts["weights"] == 16 << 30
    assert estimate(found, by_id("t4")).verdict() == "does not fit"


@pytest.mark.parametrize("name", ["flattened", "lazy", "lazy_tried"])
def test_a_shape_learned_from_a_forward_pass_is_learned_without_weights(name: str) -> None:
    from buoy.estimate.tracing.build import build

    parameters = list(build(Request("torch", {"build": f"{BUILDS}:{name}"})).model.parameters())

    assert [tuple(one.shape) for one in parameters] == [
        (8, 3, 3, 3),
        (8,),
        (8,),
        (8,),
        (10, 8 * 14 * 14),
        (10,),
    ]
    assert all(one.is_meta for one in parameters)


def test_a_step_that_reads_values_is_extrapolated_from_small_real_steps_and_says_so() -> None:
    found = traced("reads_values")

    figure = estimate(found, by_id("t4"))
    assert any("real CPU steps with 2 and 4 samples" in note for note in found.notes)
    assert figure.parts["activations"] + figure.parts["temporaries"] >= 4096 * 1000 * 4
    assert figure.reserved.high > 1.1 * figure.reserved.likely


WRONG = {
    "raises": ["the width must be even", "builds.py:"],
    "nonsense": ["returned nonsense", "received: str", "a model and a batch"],
    "prompts": ["asks for input"],
    "aborts": ["crashed", "SIGABRT", "faulthandler"],
    "wrong_shapes": ["8x100 float32, 8 int64"],
    "downloads": ["download", "192.0.2.1"],
    "custom_operation": ["buoytest", "register_fake"],
    "hungry": ["more memory than tracing may take"],
    "not_there": ["has no function `not_there`"],
    "leaves": ["sys.exit()"],
    "two_devices": ["mixes CPU tensors", "builds.py:", "device=x.device", "--on this"],
    "with_closure": ["inside its step", "--optimizer SGD", "history_size"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_comes_back_in_words(name: str) -> None:
    text = str(refused(name, memory=2 << 30))

    assert all(word in text for word in WRONG[name]), text


def test_a_build_function_that_never_ends_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    monkeypatch.setenv("BUOY_TEST_PID", str(note))

    for timeout in (10, 60):  # the second for a machine too busy to start torch in time
        text = str(refused("never_ends", timeout=timeout))
        if note.exists():
            break

    assert "did not finish" in text
    wait_until(lambda: not alive(int(note.read_text())), "the forked child to be gone")


@pytest.mark.parametrize("error", [MemoryError("25 GB"), ValueError("shapes")])
def test_of_objects_in_a_notebook_no_build_function_is_spoken_of(error: Exception) -> None:
    of_objects = explain(error, Request("torch", {"build": f"{LIVE}:build"}))
    of_a_file = explain(error, Request("torch", {"build": "train.py:build"}))

    assert "build" not in f"{of_objects.expected} {of_objects.hint}"
    assert "build()" in str(of_a_file.hint)
