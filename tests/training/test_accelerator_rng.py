"""An accelerator's generators are part of the run.

There is no accelerator on the machines that run this. The seam is the functions by which PyTorch gives out such state
(`torch.xpu.is_available`, `is_initialized`, `get_rng_state_all`, `set_rng_state_all`, `default_generators`;
`torch.cuda` has the same, `torch.mps` its `get_rng_state` and `set_rng_state`), what it was built for, and
`current_accelerator`, which names another vendor's (`mtia` here): behind them stand generators of the CPU. What a real
driver does with the bytes is not shown.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import buoy
from buoy.flight import recorder
from buoy.torch.data import rng
from buoy.torch.step.snapshot import Snapshot
from buoy.torch.step.transaction import Transaction


class Devices:
    """Two devices of a kind, each with a generator."""

    def __init__(self, count: int = 2) -> None:
        self.generators = [torch.Generator().manual_seed(number) for number in range(count)]

    def get(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def put(self, states: list[torch.Tensor]) -> None:
        if len(states) != len(self.generators):
            raise RuntimeError(f"{len(states)} states for {len(self.generators)} devices")
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def draw(self) -> list[float]:
        return [float(torch.rand((), generator=generator)) for generator in self.generators]

    def install(self, monkeypatch: pytest.MonkeyPatch, kind: str = "xpu") -> None:
        module = getattr(torch, kind)
        monkeypatch.setattr(module, "is_available", lambda: True)
        monkeypatch.setattr(module, "is_initialized", lambda: True)
        if kind == "xpu":
            monkeypatch.setattr(rng, "has_xpu", lambda: True)  # torch asks its own for what to import
        # Torch 2.6 has none of mtia.
        monkeypatch.setattr(module, "get_rng_state_all", self.get, raising=False)
        monkeypatch.setattr(module, "set_rng_state_all", self.put, raising=False)
        monkeypatch.setattr(module, "default_generators", tuple(self.generators), raising=False)
        _ask_anew(monkeypatch)


def _ask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this torch was built for is asked once per process."""
    plain = getattr(rng._accelerators, "__wrapped__", rng._accelerators)
    monkeypatch.setattr(rng, "_accelerators", plain)


def drawn(folder: Path, devices: Devices, stop_after: int) -> list[list[float]]:
    """What each batch drew on the devices; the process is lost after some of them, without a word."""
    seen = []
    counters: dict[str, int] = {}
    run = buoy.Run(folder, save=2)
    run.track(counters=counters)
    for _ in run.batches(range(6)):
        seen.append(devices.draw())
        if len(seen) == stop_after:
            break
    run._loop.is_finished = True  # nothing more is saved
    assert run._loop.manager is not None
    run._loop.manager.finish()
    return seen


def test_a_resumed_run_draws_on_the_devices_what_it_would_have_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))
    first = Devices()
    first.install(monkeypatch)
    before = drawn(tmp_path, first, 5)
    again = Devices()
    again.install(monkeypatch)
    after = drawn(tmp_path, again, 6)

    assert after[0] == before[4], "saved after the fourth batch"
    assert len(after) == 2


def test_another_number_of_devices_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))
    first = Devices()
    first.install(monkeypatch)
    drawn(tmp_path, first, 5)
    alone = Devices(1)
    alone.install(monkeypatch)
    after = drawn(tmp_path, alone, 6)

    assert len(after) == 2
    assert "the RNG state of xpu could not be restored here" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia", "mps"])
def test_a_failed_try_puts_every_devices_generator_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(1 if kind == "mps" else 2)
    if kind == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.mps, "get_rng_state", lambda: devices.get()[0])
        monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: devices.put([state]))
    else:
        devices.install(monkeypatch, kind)
    if kind == "mtia":
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    if kind in ("cuda", "mps"):
        monkeypatch.setattr(getattr(torch.backends, kind), "is_built", lambda: True)
    _ask_anew(monkeypatch)
    snapshot = Snapshot()
    snapshot.take()
    drawn_first = devices.draw()
    assert devices.draw() != drawn_first
    snapshot.restore()

    assert devices.draw() == drawn_first


def test_a_step_done_again_in_parts_draws_on_the_devices_from_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices()
    devices.install(monkeypatch)
    model = torch.nn.Linear(4, 1)
    transaction = Transaction(say=print, event=lambda kind, **values: None)
    transaction.track([model], [torch.optim.SGD(model.parameters())])
    seen: list[list[float]] = []

    def loss(part: torch.Tensor) -> torch.Tensor:
        seen.append(devices.draw())
        if len(part) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(part).square().mean()

    expected = Devices().draw()
    transaction.backward(torch.randn(8, 4), loss)

    tries = [drew for drew in seen if drew[0] != drew[1]]  # the probe holds random operations still
    assert tries.count(expected) == 2 and tries[0] == expected, (
        "the second try did not begin where the first had"
    )
    assert len(tries) == 3, "once whole, then in two parts"
