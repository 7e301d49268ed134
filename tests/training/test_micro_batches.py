"""What a run tells of its batches, and how a resumed run splits them: as before, or with a message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buoy.view.history import sizes

torch = pytest.importorskip("torch")


def test_the_largest_batch_so_far_is_told_with_the_run_it_is_of(tmp_path: Path) -> None:
    """Not each batch: an epoch's last one is smaller, every time."""
    from buoy.training.loop import MicroBatches

    told: list[tuple[str, dict[str, Any]]] = []

    def event(kind: str, **values: Any) -> None:
        told.append((kind, values))

    model = torch.nn.Linear(4, 1)
    micro = MicroBatches(str(tmp_path), None, {"say": lambda text: None, "event": event})
    micro.track(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for samples in (8, 8, 3, 8, 16, 3):
        micro.backward(torch.randn(samples, 4), lambda part: model(part).square().mean())

    batches = [values for kind, values in told if kind == "batch"]
    assert [(each["step"], each["samples"]) for each in batches] == [(0, 8), (4, 16)]
    assert {each["path"] for each in batches} == {str(tmp_path)}


def test_a_model_that_was_tracked_before_an_lbfgs_is_guarded_with_its_first_step(tmp_path: Path) -> None:
    """Its step calls the closure: a failed one is rolled back with the buffers of all that was tracked."""
    from buoy.training.loop import MicroBatches

    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.LBFGS(model.parameters())
    micro = MicroBatches(str(tmp_path), None, {"say": lambda text: None, "event": lambda *a, **k: None})
    micro.track(model)
    micro.track(optimizer)

    def closure() -> Any:
        model(torch.randn(8, 4))
        raise ValueError

    with pytest.raises(ValueError):
        optimizer.step(closure)
    assert not model[1].running_mean.any()
    assert not model[1].num_batches_tracked


TRAINING = """
import hashlib, json, os, signal, sys
import torch
import buoy
from buoy.machine.memory import _reserve, host_memory

folder, samples, dies_after, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
torch.manual_seed(1)
wide = 512 if samples > 100 else 16
model = torch.nn.Sequential(torch.nn.Linear(12, wide), torch.nn.Sigmoid(), torch.nn.Tanh(), torch.nn.Linear(wide, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
rows = torch.randn(20 * samples, 12)
model(rows[:8]).sum().backward()  # what torch loads for its first
optimizer.zero_grad()

def leave(size):  # up to where a refusal or a split comes instead of the kernel's kill
    return torch.ones(max(0, host_memory().left() - size) // 4)

if memory != "ample":  # something else has the memory up to the reserve, which is left alone
    room = host_memory()._group_room(_reserve)
    ballast = torch.ones(room // 4)
    print("left:", host_memory().free_now(), file=sys.stderr)

run = buoy.Run(folder, save=5)
run.track(model=model, optimizer=optimizer)
weights = []
for epoch in run.epochs(1):
    for batch in run.batches(list(rows.split(samples))):
        if run.step == {"tiny": 0, "short, then tiny": 8}.get(memory):
            more = leave(22 << 20)  # 3000 samples need 30, half of them 15
        run.backward(batch, lambda part: (model(part) - part.sum(1, keepdim=True)).square().mean())
        optimizer.step(); optimizer.zero_grad()
        weights.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
        print(json.dumps([run.step, weights[-1]]), flush=True)
        if run.step == dies_after:
            run._loop.manager._saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


SPLIT = "out of memory with 3000 samples; retrying the step in micro-batches of 1500"


def life(
    folder: Path, samples: int, group: Path, dies_after: int = 0, memory: str = "ample"
) -> tuple[dict[int, str], str]:
    """The weights after each step, and what was said."""

    def join() -> None:
        (group / "tasks").write_text(str(os.getpid()))

    command = [sys.executable, "-c", TRAINING, str(folder), str(samples), str(dies_after), memory]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, check=False, timeout=400)
    assert done.returncode == (-signal.SIGKILL if dies_after else 0), done.stderr
    return dict(map(json.loads, done.stdout.splitlines())), done.stderr


def test_a_resume_while_memory_is_short_leaves_tiny_batches_whole(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    """8 x 12 floats need KiB: splitting them gains nothing, and would change the bits."""
    group = make_session(1 << 30)
    undisturbed, _ = life(tmp_path / "undisturbed", 8, group)
    life(tmp_path / "run", 8, group, dies_after=8)
    resumed, said = life(tmp_path / "run", 8, group, memory="short")

    assert "left: 0\n" in said and "split" not in said
    assert list(resumed) == list(range(6, 21))
    assert resumed == {step: undisturbed[step] for step in resumed}
    assert sizes(str(tmp_path / "run")) == []


@pytest.mark.slow
def test_a_resume_while_memory_is_short_leaves_whole_what_still_fits(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    """The reserve is for such moments: a step that fits in it is not split, and its bits stay the same."""
    group = make_session(1 << 30)
    undisturbed, _ = life(tmp_path / "undisturbed", 3000, group)
    life(tmp_path / "run", 3000, group, dies_after=8)
    resumed, said = life(tmp_path / "run", 3000, group, memory="short")

    assert "left: 0\n" in said and "split" not in said and SPLIT not in said
    assert resumed == {step: undisturbed[step] for step in range(6, 21)}
    assert sizes(str(tmp_path / "run")) == []


def test_lost_steps_are_done_again_whole_and_only_new_ones_are_split_with_a_message(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    group = make_session(1 << 30)
    undisturbed, _ = life(tmp_path / "undisturbed", 3000, group)
    life(tmp_path / "run", 3000, group, dies_after=8)
    resumed, said = life(tmp_path / "run", 3000, group, memory="short, then tiny")

    lost = {step: undisturbed[step] for step in (6, 7, 8)}
    assert {step: resumed[step] for step in lost} == lost
    found = sizes(str(tmp_path / "run"))
    assert found and all(entry["step"] >= 8 for entry in found), "counted from 0"
    assert said.count(SPLIT) == 1
    assert max(resumed) == 20


def test_a_first_batch_that_is_split_is_reported(tmp_path: Path, make_session: Callable[[int], Path]) -> None:
    _, said = life(tmp_path / "run", 3000, make_session(1 << 30), memory="tiny")

    assert sizes(str(tmp_path / "run"))[0]["step"] == 0
    assert said.count(SPLIT) == 1
