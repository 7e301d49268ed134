"""Whose a second home is: two runs of the same name must not write over each other there."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from buoy.checkpoint.manifest import MANIFEST
from buoy.checkpoint.mirror import owner, worker
from buoy.checkpoint.mirror.mirror import Mirror, read_status
from buoy.checkpoint.mirror.owner import ALIVE, FILE, NotOurs, claim, expect_ours, life_of
from buoy.checkpoint.mirror.storage import FolderStorage, UrlStorage
from buoy.checkpoint.mirror.worker import fetch
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.store import Store, newest_good
from buoy.errors import UsageError
from buoy.view.checkpoints import listed
from tests.checkpoint.ground import open_saver, save
from tests.checkpoint.test_mirror import train
from tests.checkpoint.test_mirror_damage import work
from tests.processes import read, wait_until


def home_of(drive: Path) -> FolderStorage:
    return FolderStorage(str(drive), "run")


def mirrored(run: Path, drive: Path, *steps: int) -> None:
    """A run that has been trained, and copied."""
    save(run, *steps, size=400)
    claim(home_of(drive), str(run), life_of(str(run)), "there")
    work(run, drive)


def id_in(folder: Path) -> str:
    return str(json.loads((folder / FILE).read_text())["id"])


def test_the_mirror_of_another_run_is_refused_at_the_start(tmp_path: Path) -> None:
    mirrored(tmp_path / "exp3" / "run", tmp_path / "drive", 10)
    mirrored(tmp_path / "exp4" / "run", tmp_path / "other", 10)
    before = (tmp_path / "drive" / "run" / "checkpoints" / "step-000000010" / MANIFEST).read_bytes()
    with pytest.raises(UsageError) as refused:
        Mirror(str(tmp_path / "exp4" / "run"), str(tmp_path / "drive"), Keep())

    assert refused.value.message == f"{tmp_path}/drive/run holds the checkpoints of another run"
    assert "exp3/run" in str(refused.value.received)
    assert refused.value.hint == "name another mirror, or another run folder"
    told = work(tmp_path / "exp4" / "run", tmp_path / "drive")  # nor does the process that copies write there
    assert "holds the checkpoints of another run" in told["trouble"]
    assert told["newest"] is None and told["newest_safe"] is None and not told["there"]
    assert (tmp_path / "drive" / "run" / "checkpoints" / "step-000000010" / MANIFEST).read_bytes() == before


def test_a_store_that_only_a_url_reaches_has_an_owner_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "exp3" / "run"), str(tmp_path / "exp4" / "run")
    for place in ("drive", "other"):
        (tmp_path / place / "run").mkdir(parents=True)  # a store needs no folders
    claim(UrlStorage(f"file://{tmp_path}/drive", "run"), first, "one", "there")
    claim(UrlStorage(f"file://{tmp_path}/other", "run"), second, "two", "there")
    with pytest.raises(UsageError, match="there holds the checkpoints of another run"):
        claim(UrlStorage(f"file://{tmp_path}/drive", "run"), second, "two", "there")

    assert claim(UrlStorage(f"file://{tmp_path}/drive", "run"), first, "three", "there") == "exp3/run"
    orders = {
        "where": f"file://{tmp_path}/drive",
        "shown": "there",
        "name": "run",
        "run": second,
        "mount": None,
    }
    fetch({**orders, "life": "two", "step": None, "newer_than": None})
    assert '"refused": ["there/run holds the checkpoints of another run"' in capsys.readouterr().out


def test_two_runs_of_one_name_write_nothing_over_each_other_in_a_store(tmp_path: Path) -> None:
    """Not even the log, which goes there before the first checkpoint does."""
    url, there = f"file://{tmp_path}/drive", tmp_path / "drive" / "run"
    for name in ("exp3", "exp4"):
        save(tmp_path / name / "run", 10, size=400)
        attempt = recorded(tmp_path / name / "run", name)
        (tmp_path / name / "run" / FILE).write_text(json.dumps({"id": name}))
        told = work(tmp_path / name / "run", url, store, attempt=attempt)
        if name == "exp3":
            before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}

    assert there / "attempts" / "0001" / "attempt.json" in before
    assert "belongs to exp3/run" in told["trouble"] and told["not_ours"]
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before


def test_the_log_of_a_lost_machine_stays_in_a_store(tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/drive", tmp_path / "drive" / "run"
    # The third is the same training, whose copying process was started again.
    for name in (
        "old",
        "new",
        "new",
    ):
        if not (tmp_path / name / "run" / "checkpoints").exists():
            save(tmp_path / name / "run", 10, size=400)
            recorded(tmp_path / name / "run", name)
        (tmp_path / name / "run" / FILE).write_text(json.dumps({"id": "one"}))
        work(tmp_path / name / "run", url, store, attempt=tmp_path / name / "run" / "attempts" / "0001")

    logs = {path.parent.name: read(path)["boot_id"] for path in there.glob("attempts/*/attempt.json")}
    assert logs == {"0001": "old", "0002": "new"}


def store(where: str, name: str, mount: None) -> UrlStorage:
    """A store that needs no folders, as the real ones."""
    home = UrlStorage(where, name)
    home._fs.auto_mkdir = True
    return home


def recorded(run: Path, machine: str) -> Path:
    """The first attempt of this run, made on this machine and judged."""
    attempt = run / "attempts" / "0001"
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text(json.dumps({"wall": 1.0, "boot_id": machine, "pid": 7}))
    (attempt / "verdict.json").write_text("{}")
    return attempt


def test_the_end_of_a_training_whose_mirror_was_taken_over_says_the_truth(tmp_path: Path) -> None:
    code = """
save_policy._LOOK_SECONDS = 0.05
from buoy.checkpoint.mirror.owner import FILE, claim
from buoy.checkpoint.mirror.storage import FolderStorage
def each(step):
    if step == 12:
        os.makedirs(sys.argv[2] + "/new/run")
        os.link(sys.argv[1] + "/" + FILE, sys.argv[2] + "/new/run/" + FILE)  # the run on a new machine
        claim(FolderStorage(sys.argv[2], "run"), sys.argv[2] + "/new/run", "another", "there")
train(sys.argv[1], mirror=sys.argv[2], steps=45, save=10, pause=0.01, each=each)
"""
    out, err = train(tmp_path / "run", tmp_path / "drive", code)

    assert out.endswith("finished\n")
    assert "step 45 is not yet in the mirror" in err
    assert "(the run new/run has taken it over); it is not copied" in err
    assert not (tmp_path / "drive" / "run" / "checkpoints" / "step-000000045").exists()


def test_a_folder_of_its_own_checkpoints_that_never_was_there_is_another_run(tmp_path: Path) -> None:
    mirrored(tmp_path / "exp3" / "run", tmp_path / "drive", 10)
    save(tmp_path / "exp4" / "run", 10, size=400)
    with pytest.raises(UsageError, match="holds the checkpoints of another run"):
        Mirror(str(tmp_path / "exp4" / "run"), str(tmp_path / "drive"), Keep())

    shutil.copytree(tmp_path / "exp3" / "run" / "checkpoints", tmp_path / "exp5" / "run" / "checkpoints")
    with pytest.raises(UsageError) as refused:  # copied by hand: whose they are, nobody has said
        Mirror(str(tmp_path / "exp5" / "run"), str(tmp_path / "drive"), Keep())
    assert str(refused.value.hint).endswith(f"or copy its {FILE} here if they are the same run")
    shutil.copy(tmp_path / "exp3" / "run" / FILE, tmp_path / "exp5" / "run")
    Mirror(str(tmp_path / "exp5" / "run"), str(tmp_path / "drive"), Keep())


def on_another_machine(drive: Path, wall: float, *, ended: bool = False) -> None:
    """The sign of life that the process on another machine leaves in the mirror."""
    sign = {"life": "other", "machine": "another", "run": "exp1/run", "wall": wall, "ended": ended}
    (drive / "run" / ALIVE).write_text(json.dumps(sign))


def test_two_machines_at_once_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = tmp_path / "drive"
    mirrored(tmp_path / "exp1" / "run", drive, 10)
    claimed = (drive / "run" / FILE).read_bytes()
    monkeypatch.setattr(owner, "BEAT_SECONDS", 1.0)
    on_another_machine(drive, time.time())
    renews = threading.Timer(0.3, on_another_machine, (drive, time.time() + 1))
    renews.start()
    orders = {"where": str(drive), "shown": "there", "name": "run", "run": str(tmp_path / "exp2" / "run"),
              "mount": None, "life": "mine", "step": None, "newer_than": None}  # fmt: skip
    fetch(orders)
    renews.join()

    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[0]["waits"].startswith("exp1/run was trained on another machine")
    assert answers[1]["refused"][0] == "this run is being trained on another machine"
    assert len(answers) == 2 and (drive / "run" / FILE).read_bytes() == claimed


@pytest.mark.parametrize(("seconds_ago", "ended"), [(0, True), (3600, False), (0, False)])
def test_a_machine_that_has_ended_or_is_silent_does_not_hold_up_the_next(
    seconds_ago: int, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last: it was lost a moment ago, and nothing comes of it any more."""
    drive = tmp_path / "drive"
    mirrored(tmp_path / "exp1" / "run", drive, 10)
    on_another_machine(drive, time.time() - seconds_ago, ended=ended)
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.2)
    said: list[str] = []
    owner.refuse_two_machines(home_of(drive), "mine", "there", said.append)

    assert len(said) == (not ended and not seconds_ago)


def test_a_sign_of_life_never_overwrites_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training makes the mirror its own in the moment in which one writes that it lives."""
    first, second, drive = tmp_path / "exp1" / "run", tmp_path / "exp2" / "run", tmp_path / "drive"
    mirrored(first, drive, 10)
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0.0)

    class Slow(FolderStorage):
        def write_beside(self, path: str, data: bytes) -> None:
            claim(home_of(drive), str(second), "another", "there")
            super().write_beside(path, data)

    told = work(first, drive, lambda where, name, mount: Slow(where, name, mount))
    expect_ours(home_of(drive), str(second), "another", "there")
    assert read(drive / "run" / FILE)["life"] == "another"
    assert told["not_ours"] and "exp2/run has taken it over" in told["trouble"]


def test_that_a_training_has_ended_is_said_also_by_a_process_that_began_after_its_end(tmp_path: Path) -> None:
    save(tmp_path / "exp1" / "run", 10, size=400)
    work(tmp_path / "exp1" / "run", tmp_path / "drive")  # it claims the mirror too

    assert read(tmp_path / "drive" / "run" / ALIVE)["ended"] is True


def test_a_beat_in_the_note_of_the_owner_is_neither_asked_nor_in_the_way(tmp_path: Path) -> None:
    """A buoy before this one wrote there that it lives."""
    run, drive = tmp_path / "exp1" / "run", tmp_path / "drive"
    mirrored(run, drive, 10)
    (drive / "run" / ALIVE).unlink()
    beat = {"life": "other", "machine": "another", "wall": time.time(), "ended": False}
    (drive / "run" / FILE).write_text(json.dumps({**read(drive / "run" / FILE), **beat}))
    owner.refuse_two_machines(home_of(drive), "mine", "there", pytest.fail)
    claim(home_of(drive), str(run), "mine", "there")

    assert read(drive / "run" / FILE).keys() == {"schema", "id", "life", "run", "path", "since"}


def test_the_process_that_copies_leaves_signs_of_life_until_its_training_ends(tmp_path: Path) -> None:
    code = """
save_policy._LOOK_SECONDS = 0.05
def each(step):
    if step == 25:
        print(open(sys.argv[2] + "/run/alive.json").read())
train(sys.argv[1], mirror=sys.argv[2], steps=30, save=10, pause=0.05, each=each)
"""
    out, err = train(tmp_path / "run", tmp_path / "drive", code)
    alive = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert alive["ended"] is False and alive["run"].endswith("/run"), err

    wait_until(lambda: read(tmp_path / "drive" / "run" / ALIVE)["ended"], "the last sign of life")
    assert read(tmp_path / "drive" / "run" / ALIVE)["life"] == alive["life"]


def test_a_new_machine_takes_the_run_over_and_says_whose_it_was(tmp_path: Path) -> None:
    mirrored(tmp_path / "exp1" / "run", tmp_path / "drive", 10, 20)
    said: list[str] = []
    mirror = Mirror(str(tmp_path / "exp2" / "run"), str(tmp_path / "drive"), Keep())
    found = newest_good(Store(tmp_path / "exp2" / "run"), mirror, said.append, lambda *words: None)

    assert found is not None and found.step == 20
    assert said == [
        f"step 20 was brought back from the mirror {tmp_path}/drive (made by the run exp1/run; this one is exp2/run: "
        "if that is another training, name another mirror or another run folder)"
    ]
    assert (
        id_in(tmp_path / "exp2" / "run")
        == id_in(tmp_path / "exp1" / "run")
        == id_in(tmp_path / "drive" / "run")
    )
    with pytest.raises(NotOurs, match="the run exp2/run has taken it over"):
        first = str(tmp_path / "exp1" / "run")
        expect_ours(home_of(tmp_path / "drive"), first, life_of(first), "there")


def test_a_run_that_is_being_trained_here_is_not_not_ours(tmp_path: Path) -> None:
    mirrored(tmp_path / "exp1" / "run", tmp_path / "drive", 10)
    training = open_saver(tmp_path / "exp1" / "run")
    with pytest.raises(UsageError) as refused:
        Mirror(str(tmp_path / "exp2" / "run"), str(tmp_path / "drive"), Keep())
    training.close()

    assert "exp1/run, which is being trained at this moment" in str(refused.value.received)


def test_a_mirror_of_an_older_buoy_is_adopted(tmp_path: Path) -> None:
    save(tmp_path / "drive" / "run", 10, size=400)
    said: list[str] = []
    mirror = Mirror(str(tmp_path / "here" / "run"), str(tmp_path / "drive"), Keep())
    found = newest_good(Store(tmp_path / "here" / "run"), mirror, said.append, lambda *words: None)

    assert found is not None and said == [f"step 10 was brought back from the mirror {tmp_path}/drive"]
    assert id_in(tmp_path / "here" / "run") == id_in(tmp_path / "drive" / "run")


@pytest.mark.parametrize("words", [b"", b"{", b"[1]", b'{"id": 3}'])
def test_a_torn_note_of_the_owner_stops_nobody(words: bytes, tmp_path: Path) -> None:
    mirrored(tmp_path / "exp1" / "run", tmp_path / "drive", 10)
    (tmp_path / "drive" / "run" / FILE).write_bytes(words)
    claim(home_of(tmp_path / "drive"), str(tmp_path / "exp1" / "run"), "again", "there")

    assert id_in(tmp_path / "drive" / "run") == id_in(tmp_path / "exp1" / "run")


def test_the_list_compares_content_not_names(tmp_path: Path) -> None:
    run = tmp_path / "exp1" / "run"
    mirrored(run, tmp_path / "drive", 10)
    assert listed("run", Store(run).list(), read_status(str(run))).splitlines()[2].endswith("yes")

    made = Store(run).list()[0]
    shutil.rmtree(run / "checkpoints")
    save(run, 10, size=400)  # the same name and step, made in another life
    assert Store(run).list()[0].name == made.name
    assert listed("run", Store(run).list(), read_status(str(run))).splitlines()[2].endswith("no")
    assert os.path.exists(tmp_path / "drive" / "run" / "checkpoints" / made.name)


def test_of_a_list_that_an_older_buoy_kept_nothing_is_claimed(tmp_path: Path) -> None:
    save(tmp_path / "run", 10, size=400)
    status = {"home": "drive", "there": ["step-000000010"], "newest": 10, "newest_safe": 1.0}

    assert listed("run", Store(tmp_path / "run").list(), status).splitlines()[2].endswith("n/a")
