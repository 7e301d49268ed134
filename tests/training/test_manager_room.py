"""Where the room gets short while it trains: fewer are kept, an older one gives way, and saving goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint import retention
from buoy.checkpoint.retention import DiskBudget, Keep
from buoy.checkpoint.saver import Receipt
from buoy.checkpoint.store import Store, Unusable
from tests.checkpoint.ground import about, as_tensor, state
from tests.conftest import MountedDrive
from tests.training.test_manager import kept, run, saves


class Saving:
    """A disk budget with its store and its writer, and no training around it."""

    def __init__(self, folder: Path, allowed: int | None, keep: Keep) -> None:
        self.said: list[str] = []
        self.store = Store(folder)
        self.saver = self.store.saver(self.said.append, self._event)
        self.budget = DiskBudget(
            self.store, keep, allowed, lambda topic, text: self.said.append(text), self._event
        )

    def _event(self, kind: str, **values: Any) -> None:
        """The flight log is not looked at here."""

    def save(self, step: int, size: int, **more: Any) -> Receipt:
        """As the keeper does it: room, write, learn, tidy."""
        receipt = self.saver.save(
            state(step, size), about(step, **more), as_tensor, wait=True, make_room=self.budget.make_room
        )
        if receipt.committed:
            self.store.trust(receipt)
            self.said += [words] if (words := self.budget.learn(receipt.bytes, None)) else []
            self.budget.tidy()
            self.budget.settle()
        return receipt

    @property
    def steps(self) -> list[int]:
        return [entry.step for entry in self.store.list()]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Callable[..., Saving]]:
    made: list[Saving] = []

    def make(allowed: int | None = None, keep: Keep | None = None, folder: Path = tmp_path) -> Saving:
        made.append(Saving(folder, allowed, keep or Keep(last=2)))
        return made[-1]

    yield make
    for one in made:
        one.saver.close()


def test_what_is_kept_is_planned_again_for_what_a_checkpoint_really_takes(
    saving: Callable[..., Saving],
) -> None:
    """Three of the expected size fit and two of the real one: with the first plan nothing fits any more."""
    run = saving(700_000)
    assert run.budget.plan(180_000, None).keep.last == 2
    receipts = [run.save(step, 180_000) for step in range(1, 6)]

    assert all(receipt.committed for receipt in receipts) and run.steps == [5]
    assert len(run.said) == 1
    assert re.fullmatch(r"checkpoints are 27\d\.\d KiB, not 175\.8 KiB: keeping the last one", run.said[0])


def test_it_is_planned_again_when_it_grows_and_not_for_a_few_bytes(saving: Callable[..., Saving]) -> None:
    run = saving(700_000)
    run.budget.plan(run.save(1, 120_000).bytes, None)
    receipts = [run.save(step, size) for step, size in enumerate([120_000, 125_000, 180_000, 180_000], 2)]

    assert all(receipt.committed for receipt in receipts) and run.steps == [5]
    assert len(run.said) == 1 and run.said[0].startswith("checkpoints are 27"), run.said


def test_where_no_third_fits_the_older_of_two_gives_way_before_the_write(
    saving: Callable[..., Saving],
) -> None:
    run = saving(700_000)
    receipts = [run.save(step, size) for step, size in enumerate([120_000, 120_000, 220_000, 220_000], 1)]

    assert all(receipt.committed for receipt in receipts)
    assert run.said[0].startswith("there is no longer room for 3 checkpoints: step 1 removed, step 2 is good")
    assert run.said[0].endswith("keeping the last one until there is room again")
    assert run.steps == [4]


def test_a_damaged_newest_one_is_never_all_that_stays(saving: Callable[..., Saving]) -> None:
    run = saving(700_000)
    for step in (1, 2):
        run.save(step, 120_000)
    with open(os.path.join(run.store.list()[0].folder, "state.safetensors"), "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    refused = run.save(3, 230_000)

    assert refused.error is not None and "do not fit" in refused.error
    assert run.steps == [2, 1]


def test_only_when_not_even_one_fits_beside_the_last_good_one_nothing_is_saved(
    saving: Callable[..., Saving],
) -> None:
    run = saving(700_000)
    for step in (1, 2):
        run.save(step, 120_000)
    refused = run.save(3, 400_000)

    wanted = (
        r"59\d\.\d KiB do not fit beside the last good one: at most 49\d\.\d KiB of 683\.6 KiB can be made available, "
        r"\d+\.\d KiB more are needed, which `disk=` does not allow"
    )
    assert refused.error is not None and re.fullmatch(wanted, refused.error), refused.error
    assert run.steps == [2, 1]  # nothing is given up where that would not do


def test_a_damaged_one_that_makes_room_is_no_good_one_less(saving: Callable[..., Saving]) -> None:
    """Only one good one is left and its every byte was read: then the damaged one goes, and the plan stands."""
    run = saving(720_000, Keep(last=3))
    for step in (1, 2):
        run.save(step, 120_000)
    run.store.remember_damage(Unusable(2, run.store.list()[0].folder, "its checksum does not match"))

    assert run.save(3, 260_000).committed and run.steps == [3, 1]
    assert run.said == [] and run.save(4, 80_000).committed
    assert run.steps == [4, 3, 1], "as many are kept as before"


def test_a_pinned_one_is_none_of_the_last_few(saving: Callable[..., Saving]) -> None:
    run = saving(900_000, Keep(last=3))
    run.save(1, 120_000, pin="kept")
    for step in (2, 3):
        run.save(step, 120_000)

    assert run.save(4, 300_000).committed and run.steps == [4, 1]
    assert "step 2 removed, step 3 is good and stays; keeping the last one" in run.said[0]


def test_the_last_finite_one_counts_in_the_room(saving: Callable[..., Saving]) -> None:
    """Where three and the next one fit, only two are kept beside it; three again once the loss is finite."""
    run = saving(760_000, Keep(last=3))
    run.budget.plan(run.save(1, 120_000, finite=True).bytes, None)
    for step in range(2, 9):
        assert run.save(step, 120_000, finite=step in (2, 8)).committed
        if step == 7:
            assert run.steps == [7, 6, 2] and len(run.said) == 1, run.said
            assert run.said[0].endswith("keeping the last 2 and the last finite one")
    assert run.save(9, 120_000, finite=True).committed

    assert len(run.said) == 2 and run.said[1].endswith(" KiB: keeping the last 3") and run.steps == [9, 8, 7]


def test_a_pinned_one_gives_no_way(saving: Callable[..., Saving]) -> None:
    run = saving(700_000)
    run.save(1, 120_000, pin="kept")
    run.save(2, 120_000)

    assert run.save(3, 230_000).error is not None and run.steps == [2, 1]


def test_a_quota_that_nobody_sees_is_answered_with_one_after_the_other(saving: Callable[..., Saving]) -> None:
    run = saving(keep=Keep(last=4))
    for step in (1, 2, 3, 4):
        size = run.save(step, 120_000).bytes

    assert not run.budget.give_way(size, is_sure=False) and run.steps == [4, 3, 2, 1]
    gave_way = [run.budget.give_way(size, is_sure=True) for _ in range(4)]
    assert gave_way == [True, True, True, False] and run.steps == [4]


def test_as_many_are_kept_as_planned_once_room_is_short_no_more(
    saving: Callable[..., Saving], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saving(keep=Keep(last=3))
    run.budget.plan(run.save(1, 120_000).bytes, None)
    size = [run.save(step, 120_000).bytes for step in (2, 3)][-1]
    while run.budget.give_way(size, is_sure=True):
        pass
    assert run.steps == [3] and run.said[-1].endswith("keeping the last one until there is room again")
    assert [run.save(step, 120_000).committed for step in (4, 5)] == [True, True] and run.steps == [5]

    monkeypatch.setattr(retention, "_SHORT_SECONDS", 0.0)
    for step in (6, 7, 8, 9):
        assert run.save(step, 120_000).committed
    assert run.steps == [9, 8, 7] and run.said[-1] == "there is room again: keeping the last 3"
    assert sum(each.startswith("there is room again") for each in run.said) == 1


def test_an_error_that_passes_removes_no_checkpoint(make_drive: Callable[..., MountedDrive]) -> None:
    """ENOSPC once, with gigabytes free, as network drives answer now and then."""
    drive = make_drive()
    code = """
from buoy.training import manager, save_policy
save_policy._RETRY_SECONDS, full, said = 0.2, os.path.join(os.path.dirname(sys.argv[1]), "full"), manager.say
def say(text):
    said(text)
    if "was not saved" in text:
        os.unlink(full)
manager.say = say
def each(step):
    while step == 45 and not os.path.exists(sys.argv[1] + "/checkpoints/step-000000040"): time.sleep(0.01)
    if step == 45: open(full, "w").close()
    if step == 55: time.sleep(1.0)  # the writer has told by now
train(sys.argv[1], steps=100, save=10, size=1000, keep=3, pause=0.01, each=each)
"""
    done = run(drive.path / "run", code)

    assert done.stdout.endswith("finished\n"), done.stderr
    assert (
        done.stderr.count(
            "step 50 was not saved: No space left on device, though the disk reports 4.0 GiB free; "
            "step 40 is the newest that is safe"
        )
        == 1
    )
    assert "removed" not in done.stderr and "until there is room" not in done.stderr
    assert kept(drive.path / "run")[0] == 100 and len(kept(drive.path / "run")) == 3


def test_a_quota_that_the_disk_does_not_report_is_believed_after_some_tries(
    make_drive: Callable[..., MountedDrive],
) -> None:
    drive = make_drive()
    code = """
from buoy.training import manager, save_policy
save_policy._RETRY_SECONDS, save_policy._RETRY_MOST = 0.1, 0.1
full = os.path.join(os.path.dirname(sys.argv[1]), "full")
def each(step):
    while step == 45 and not os.path.exists(sys.argv[1] + "/checkpoints/step-000000040"): time.sleep(0.01)
    if step == 45: open(full, "w").close()
train(sys.argv[1], steps=300, save=10, size=1000, keep=3, pause=0.01, each=each)
"""
    done = run(drive.path / "run", code)

    assert "though the disk reports 4.0 GiB free" in done.stderr
    assert (
        "there is no longer room for 3 checkpoints: step 30 removed, step 40 is good and stays" in done.stderr
    )
    assert kept(drive.path / "run") == [40]


def test_a_training_goes_on_saving_where_the_disk_fills_up_under_a_write(
    make_disk: Callable[[str], Path],
) -> None:
    """Filled after the room was measured: only the writer sees it, and tells it some steps later."""
    disk = make_disk("6m")
    code = """
from buoy.checkpoint import retention as budget
filler = os.path.join(os.path.dirname(sys.argv[1]), "filler")
def fill():
    with open(filler, "ab", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: file.truncate(file.tell() - (128 << 10))  # for the flight log, which grows meanwhile
real = budget.room
def room(folder, *arguments):
    found = real(folder, *arguments)
    there = [name for name in os.listdir(os.path.join(folder, "checkpoints")) if name.startswith("step-")]
    if len(there) == 2 and not os.path.exists(filler): fill()
    return found
budget.room = room
def each(step):
    saved = f"{sys.argv[1]}/checkpoints/step-{step - 5:09d}"
    while step in (15, 25) and not os.path.exists(saved): time.sleep(0.01)
    if step == 32: time.sleep(1.0)  # the writer has time to fail
train(sys.argv[1], steps=60, save=10, size=100_000, keep=2, pause=0.01, each=each)
"""
    done = run(disk / "run", code)

    assert done.stdout.endswith("finished\n") and "was not saved" not in done.stderr, done.stderr
    assert "step 10 removed, step 20 is good and stays" in done.stderr
    again = int(saves(done)[3][0])  # at once, not in a minute
    assert 30 < again < 40 and kept(disk / "run")[0] == 60
