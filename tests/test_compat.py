"""A private name that a framework does not have (any more) is reported, and done without."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, dataloader  # noqa: E402

from buoy import _compat, errors  # noqa: E402
from buoy._compat import torch as compat  # noqa: E402


@pytest.fixture(autouse=True)
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(_compat, "trouble", lambda where, error: found.append(f"{where}: {error}"))
    return found


def test_what_is_missing_is_reported_with_what_is_lost(reported: list[str]) -> None:
    assert _compat.borrowed(torch, "_no_such_name", 3, "nothing is counted") == 3
    assert _compat.borrowed(torch, "__version__", 3, "nothing is counted") == torch.__version__
    assert reported == ["nothing is counted: this version has no torch._no_such_name"]


def test_only_what_is_there_is_replaced() -> None:
    class Owner:
        name = 1

    with _compat.patched(Owner, "name", 2), _compat.patched(Owner, "other", 2):
        assert Owner.name == 2 and not hasattr(Owner, "other")

    assert Owner.name == 1 and not hasattr(Owner, "other")


def test_data_loaders_work_where_their_iterators_have_other_names(
    monkeypatch: pytest.MonkeyPatch, reported: list[str]
) -> None:
    from buoy.torch.data.workers import draw_in_every_pass

    for kind in (dataloader._MultiProcessingDataLoaderIter, dataloader._BaseDataLoaderIter):
        monkeypatch.delattr(kind, "_reset")

    draw_in_every_pass()

    assert compat.worker_iterators() is None
    assert "persistent workers make a resume differ" in reported[0]


def test_tensors_and_modules_are_read_without_the_names_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, reported: list[str]
) -> None:
    module: Any = torch.nn.BatchNorm1d(2)
    del module._non_persistent_buffers_set
    monkeypatch.delattr(torch, "_foreach_copy_")
    into, source = [torch.zeros(2)], [torch.ones(2)]

    compat.copy_all(into, source)

    assert compat.unsaved_buffers(module) == set()
    assert "buffers with persistent=False are not restored" in reported[0]
    assert torch.equal(into[0], source[0])
    assert compat.has_usual_passes(DataLoader([1, 2]))


def test_a_lightning_without_what_a_guard_needs_is_named_before_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from buoy._compat.lightning import missing
    from buoy.lightning import _LIBRARY, _refuse

    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    assert missing(trainer, _LIBRARY) == []

    monkeypatch.delattr(type(trainer.fit_loop.epoch_loop.automatic_optimization), "_make_closure")

    with pytest.raises(errors.UsageError, match=r"not known to buoy\.lightning\.Guard") as refused:
        _refuse(trainer, lightning.LightningModule())
    assert "_make_closure" in str(refused.value)
