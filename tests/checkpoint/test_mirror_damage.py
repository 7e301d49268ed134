"""Damage and half copies in the second home: named, never taken for a checkpoint, and no silent new beginning."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.manifest import MANIFEST, STATE, seal
from buoy.checkpoint.mirror import worker
from buoy.checkpoint.mirror.mirror import Mirror, read_status
from buoy.checkpoint.mirror.owner import life_of
from buoy.checkpoint.mirror.storage import FolderStorage, Storage, UrlStorage, open_storage
from buoy.checkpoint.mirror.worker import Worker
from buoy.checkpoint.retention import Keep, surplus, to_give_up
from buoy.checkpoint.store import Checkpoint, Store, newest_good
from buoy.errors import RunFolderError
from buoy.view.checkpoints import listed
from tests.checkpoint.ground import about, as_tensor, open_saver, save, state
from tests.processes import buoy, read, wait_until

TRAIN = (
    "import sys; from tests.training.loop import *; train(sys.argv[1], mirror=sys.argv[2], steps=60, pause=0)"
)


def go_on(run: Path, mirror: Path) -> subprocess.CompletedProcess[str]:
    """A training over this run folder and mirror, in a process of its own."""
    command = [sys.executable, "-c", TRAIN, str(run), str(mirror)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def mirrored(tmp_path: Path, *steps: int) -> Path:
    """A mirror that holds these steps of a run whose own machine is gone; the run's folder in it."""
    save(tmp_path / "drive" / "run", *steps, size=400)
    (tmp_path / "drive" / "run" / "checkpoints" / "lock").unlink()
    return tmp_path / "drive" / "run"


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:09d}"


def cut_short(run: Path, step: int) -> None:
    os.truncate(place(run, step) / STATE, 512)


def flip(run: Path, step: int) -> None:
    path = place(run, step) / STATE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def search(tmp_path: Path, mirror: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that a run here would go on from, and what is said on the way."""
    said: list[str] = []
    there = Mirror(str(tmp_path / "run"), str(tmp_path / "drive"), Keep()) if mirror else None
    return newest_good(
        Store(tmp_path / "run"), there, said.append, lambda topic, text: pytest.fail(text)
    ), said


def work(
    run: Path,
    home: object,
    home_of: Callable[..., Any] = open_storage,
    keep: int = 3,
    attempt: Path | None = None,
) -> dict[str, Any]:
    """The mirror's own process, in this one, for a training that has ended: until nothing is left to do."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    orders = {"run": str(run), "name": "run", "where": str(home), "shown": str(home), "mount": None, "path": [],
              "keep": {"last": keep, "best": None, "every": None}, "retry": 0.01, "pid": ended.pid,
              "attempt": str(attempt) if attempt is not None else None, "unusable": [],
              "life": life_of(str(run))}  # fmt: skip
    worker.open_storage = home_of
    try:
        Worker(orders).run()
    finally:
        worker.open_storage = open_storage
    return dict(read(run / "mirror.json"))


def test_a_copy_whose_manifest_is_no_file_is_not_tidied_up_as_a_half(tmp_path: Path) -> None:
    """It is damaged: only what was never finished goes once a newer one is whole."""
    run = mirrored(tmp_path, 10, 20)
    (place(run, 10) / MANIFEST).unlink()
    os.mkfifo(place(run, 10) / MANIFEST)
    cut = place(run, 5)
    cut.mkdir()
    (cut / STATE).write_bytes(b"begun")
    newest, _ = search(tmp_path)
    assert newest is not None and newest.step == 20

    work(tmp_path / "run", tmp_path / "drive")

    assert place(run, 10).exists() and not cut.exists()


def test_a_run_whose_every_copy_is_damaged_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 10, 20, 30, 40, 50)
    before = sorted(path.name for path in (copies / "checkpoints").iterdir())
    whole = (place(copies, 50) / STATE).stat().st_size
    for step in (10, 20, 30, 50):
        cut_short(copies, step)
    flip(copies, 40)
    done = go_on(tmp_path / "run", tmp_path / "drive")

    lines = [
        line for line in done.stderr.splitlines() if line.startswith("buoy:") and "same disk" not in line
    ]
    assert lines[0] == f"buoy: step 50 in the mirror is damaged ({STATE}: it has 512 bytes, expected {whole})"
    assert "step 40 in the mirror is damaged" in lines[1] and "its checksum does not match" in lines[1]
    assert lines[3] == "buoy: and 2 more checkpoints that cannot be used in the mirror: steps 20, 10"
    assert done.returncode == 1 and "from 0" not in done.stdout
    assert "no good checkpoint of this run is left (5 damaged)" in done.stderr
    assert f"step 50: {STATE}: it has 512 bytes, expected {whole}" in done.stderr
    assert f"and the mirror {tmp_path / 'drive'}" in done.stderr and "another run folder" in done.stderr
    assert sorted(path.name for path in (copies / "checkpoints").iterdir()) == before


def test_the_command_line_names_them_too(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 40)
    (place(copies, 40) / "values.json").unlink()
    done = buoy("ckpt", "restore", str(copies), "--to", str(tmp_path / "back"))

    assert done.returncode == 1 and "has no good checkpoint" in done.stderr
    assert "step 40 in the mirror is damaged (values.json: it is missing)" in done.stderr


def test_only_damaged_ones_here_are_no_new_beginning_either(tmp_path: Path) -> None:
    save(tmp_path / "run", 10, 20, size=400)
    cut_short(tmp_path / "run", 10)
    flip(tmp_path / "run", 20)
    with pytest.raises(
        RunFolderError, match=r"no good checkpoint of this run is left \(2 damaged\)"
    ) as refused:
        search(tmp_path, mirror=False)

    assert "step 20: state.safetensors: its checksum does not match" in str(refused.value)
    assert len(Store(tmp_path / "run").list()) == 2


def test_the_newer_one_that_is_passed_over_is_named_wherever_it_is(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 20, 30, 40)
    save(tmp_path / "run", 10, 50, size=400)
    cut_short(tmp_path / "run", 50)
    cut_short(copies, 40)
    (place(copies, 30) / MANIFEST).unlink()
    found, said = search(tmp_path)

    assert found is not None and found.step == 20
    assert (
        "step-000000050: state.safetensors: it has 512 bytes" in said[0]
        and "trying the one before" in said[0]
    )
    assert said[1].startswith("step 40 in the mirror is damaged (state.safetensors: it has 512 bytes")
    assert said[2].startswith("step 30 in the mirror is not whole (manifest.json is missing")
    assert said[3:] == [f"step 20 was brought back from the mirror {tmp_path / 'drive'}"]


def test_one_of_a_newer_buoy_is_no_new_beginning(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 10)
    path = place(copies, 10) / MANIFEST
    fields = {**json.loads(path.read_bytes()), "schema": "buoy.checkpoint/2"}
    del fields["crc32"]
    path.write_bytes(seal(fields))
    with pytest.raises(
        RunFolderError, match="this version of buoy cannot read any checkpoint of this run"
    ) as refused:
        search(tmp_path)

    assert refused.value.received == "step 10: manifest.json: buoy.checkpoint/2"


def test_a_first_copy_that_was_never_finished_is_said_and_is_no_reason_not_to_begin(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 10)
    (place(copies, 10) / MANIFEST).unlink()
    found, said = search(tmp_path)

    assert found is None and "step 10 in the mirror is not whole" in said[0]
    assert said[1] == "no checkpoint in the mirror was ever complete (1 begun): the training starts at step 0"


def test_a_step_made_again_while_it_is_copied_leaves_no_half_copy(tmp_path: Path) -> None:
    """Made twice, the first one is removed here in the middle of its copy."""
    run = tmp_path / "run"
    saver = open_saver(run)
    saver.save(state(1, 400), about(42), as_tensor, wait=True)
    again = False

    class Slow(FolderStorage):
        def put(self, source: str, name: str, file: str, *rest: Any) -> None:
            nonlocal again
            super().put(source, name, file, *rest)
            if not again:
                again = True
                saver.save(state(2, 400), about(42), as_tensor, wait=True)
                Store(run).remove(Store(run).list()[1])

    told = work(run, tmp_path / "drive", lambda where, name, mount: Slow(where, name, mount))
    saver.close()

    assert again and os.listdir(tmp_path / "drive" / "run" / "checkpoints") == ["step-000000042.2"]
    assert list(told["there"]) == ["step-000000042.2"] and told["copying"] is None


def test_half_copies_of_a_life_before_go_once_a_whole_one_is_as_new(tmp_path: Path) -> None:
    copies = mirrored(tmp_path, 10, 20, 90)
    for step in (10, 90):
        (place(copies, step) / MANIFEST).unlink()
    cut_short(copies, 20)
    save(tmp_path / "run", 30, size=400)
    work(tmp_path / "run", tmp_path / "drive")

    # The damaged one was a checkpoint once, and the newest half may be all that is left of its step.
    kept = ["step-000000020", "step-000000030", "step-000000090"]
    assert sorted(os.listdir(copies / "checkpoints")) == kept


def test_files_of_two_lives_never_stand_under_one_manifest(tmp_path: Path) -> None:
    """Sizes are the same from life to life: the old manifest would make a half copy look whole."""
    copies = mirrored(tmp_path, 40)
    (place(copies, 40) / "values.json").unlink()
    saver = open_saver(tmp_path / "run")
    saver.save(state(7, 400), about(40), as_tensor, wait=True)
    saver.close()
    seen: list[list[str]] = []

    class Watched(FolderStorage):
        def put(self, source: str, name: str, file: str, *rest: Any) -> None:
            seen.append(sorted(self.sizes().get(name, {})))
            super().put(source, name, file, *rest)

    work(tmp_path / "run", tmp_path / "drive", lambda where, name, mount: Watched(where, name, mount))

    assert seen == [[], [STATE]]
    newest = Store(copies).newest(pytest.fail)
    assert newest is not None and newest.value("step", lambda stored: None) == 7


def test_safe_is_said_only_of_what_this_process_sent(tmp_path: Path) -> None:
    """What an earlier life has sent is there by its size: a bit may have changed there since."""
    run = tmp_path / "run"
    save(run, 10, 20, size=400)
    first = work(run, tmp_path / "drive")
    again = work(run, tmp_path / "drive")
    shown = listed("run", Store(run).list(), read_status(str(run)))
    save(run, 30, size=400)
    third = work(run, tmp_path / "drive")

    assert first["newest"] == again["newest"] == 20 and first["newest_safe"] and again["newest_safe"] is None
    assert f"step 20 in the mirror {tmp_path / 'drive'}, by its size: it was sent earlier" in shown
    assert third["newest"] == 30 and third["newest_safe"]


@pytest.mark.parametrize(("lost", "newest_at_first"), [((100,), 40), ((40, 100), 100)])
def test_a_newer_one_of_an_earlier_life_there_is_not_taken_for_this_ones_last(
    lost: tuple[int, ...], newest_at_first: int, tmp_path: Path
) -> None:
    """The mirror could not be read at the start: the run went on from what is here."""
    run, copies = tmp_path / "run", tmp_path / "drive" / "run"
    save(run, 40, 100, size=400)
    work(run, tmp_path / "drive")
    for step in lost:
        shutil.rmtree(place(run, step))
    said: list[str] = []
    mirror = Mirror(str(run), str(tmp_path / "drive"), Keep())
    mirror.start()
    wait_until(lambda: read_status(str(run)).get("there"), "what it holds")
    before = read_status(str(run))
    save(run, 50, size=400)
    newest = Store(run).list()[0]
    mirror.finish(newest.step, newest.time, said.append)
    told = read_status(str(run))
    os.kill(told["pid"], signal.SIGKILL)

    assert before["newest"] == newest_at_first and "step-000000100" in before["there"]
    assert said == [f"step 50 is safe in the mirror {tmp_path / 'drive'}"] and told["newest"] == 50
    assert (place(copies, 50) / MANIFEST).exists() and (place(copies, 100) / MANIFEST).exists()


def test_a_last_one_that_was_sent_earlier_is_there_although_an_older_one_was_sent_since(
    tmp_path: Path,
) -> None:
    run, drive = tmp_path / "run", tmp_path / "drive"
    save(run, 30, 40, size=400)
    work(run, drive)
    shutil.rmtree(place(drive / "run", 30))
    told = work(run, drive)

    assert len(told["there"]) == 2 and told["newest"] == 40 and told["newest_safe"] is None


def test_what_a_search_found_damaged_is_not_told_as_safe_nor_counted(tmp_path: Path) -> None:
    """Right by its size: only the search has read its bytes."""
    copies = mirrored(tmp_path, 30, 40, 50)
    for step in (40, 50):
        flip(copies, step)
    done = go_on(tmp_path / "run", tmp_path / "drive")

    assert done.stdout.startswith("from 30\n"), done.stderr
    assert "step 50 is safe" not in done.stderr and "step 60 is safe in the mirror" in done.stderr
    assert {"step-000000030", "step-000000060"} <= set(os.listdir(copies / "checkpoints"))


def test_damage_here_is_not_copied_and_called_safe_nor_does_it_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 5, 10, 20, size=400)
    flip(tmp_path / "run", 20)
    monkeypatch.setattr(worker, "_LOOK_SECONDS", 0.0)  # at every piece it asks for a newer one
    sent: list[str] = []

    class Counted(FolderStorage):
        def put(self, source: str, name: str, file: str, *rest: Any) -> None:
            sent.append(name)
            if len(sent) > 10:
                raise SystemExit("the older one is begun again and again")
            super().put(source, name, file, *rest)

    told = work(tmp_path / "run", tmp_path / "drive", lambda where, name, mount: Counted(where, name, mount))

    assert told["damaged_here"] is None  # a good one was copied after it
    assert list(told["there"]) == ["step-000000005", "step-000000010"] and told["newest"] == 10
    assert [int(name[5:]) for name in sent] == [20, 10, 10, 5, 5]


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_an_older_one_under_way_gives_way_to_a_newer_one(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was the newest when its copying began is sent to its end, else nothing might ever arrive."""
    run, drive = tmp_path / "run", tmp_path / "drive"
    save(run, 10, 20, size=400)
    monkeypatch.setattr(worker, "_LOOK_SECONDS", 0.0)
    sent: list[int] = []
    saved = {1: 30, 5: 40}

    def home_of(where: str, name: str, mount: None) -> Storage:
        home = open_storage(where, name, mount)
        if isinstance(home, UrlStorage):
            home._fs.auto_mkdir = True  # as a real store, which needs no folders
        put = home.put

        def watched(source: str, name: str, file: str, *rest: Any) -> None:
            sent.append(int(name[5:]))
            if len(sent) in saved:
                save(run, saved[len(sent)], size=400)
            put(source, name, file, *rest)

        monkeypatch.setattr(home, "put", watched)
        return home

    told = work(run, f"{protocol}{drive}", home_of, keep=4)
    newest = Store(drive / "run").newest(pytest.fail)

    assert sent == [20, 20, 30, 30, 10, 40, 40, 10, 10]
    assert newest is not None and newest.step == told["newest"] == 40 and len(told["there"]) == 4
    assert told["trouble"] is None and told["copying"] is None


def test_a_full_mirror_keeps_the_newest_and_takes_the_next(
    tmp_path: Path, make_disk: Callable[[str], Path]
) -> None:
    """Room for two: the older of two goes, since there are good ones here as well."""
    drive = make_disk("500k")
    run = tmp_path / "run"
    for step in (10, 20, 30):
        save(run, step, size=140_000)
        told = work(run, drive)

    assert told["newest"] == 30 and told["trouble"] is None
    assert list(told["there"]) == ["step-000000020", "step-000000030"]


def test_what_a_search_found_damaged_neither_counts_nor_goes_with_the_old_ones(tmp_path: Path) -> None:
    """Its sizes fit, so only the search knows it: the next life, which never reads it again, must know it too."""
    run = tmp_path / "run"
    save(run, 10, 20, 30, size=400)
    flip(run, 30)
    found, _ = search(tmp_path, mirror=False)
    save(run, 40, 50, size=400)
    entries = Store(run).list()

    assert found is not None and found.step == 20
    assert [entry.step for entry in entries if entry.complete] == [50, 40, 20, 10]
    assert [entry.step for entry in surplus(entries, Keep(last=3))] == [10]
    assert to_give_up(entries, Keep(last=3))[0].step == 30  # but the first to go when the disk is full
    assert "damaged" in buoy("ckpt", "list", str(run)).stdout

    flip(run, 30)  # mended: a copy of it was brought from elsewhere
    Store(run).open(entries[2])
    assert [entry.step for entry in Store(run).list() if entry.complete] == [50, 40, 30, 20, 10]
