"""`buoy ckpt` on real run folders: what it shows, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.store import Entry, Store
from buoy.cli import main
from buoy.view.checkpoints import listed
from tests.checkpoint.ground import forge, save
from tests.processes import buoy

MAKE = """
import sys
from tests.training.loop import *
with kept(sys.argv[1], keep=9) as keeper:
    for step, loss in ((100, 3.0), (200, 1.5), (300, 2.0)):
        keeper.save(items(step, 5000), step=step, epoch=step // 100, reason="steps", metrics={"val_loss": loss},
                    pin="before the new data" if step == 100 else None, as_tensor=as_tensor, wait=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cats"
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], check=True, timeout=400, capture_output=True)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run with steps 100 (pinned), 200 (the best) and 300, to do with as one likes."""
    return Path(shutil.copytree(made, tmp_path / "runs" / "cats"))


def ckpt(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return buoy("ckpt", *map(str, words), **options)


def flip(run: Path, step: int, file: str, at: int = -3) -> None:
    path = run / "checkpoints" / f"step-{step:09d}" / file
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_list_shows_what_there_is_newest_first(run: Path) -> None:
    done = ckpt("list", run)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]

    assert done.returncode == 0 and "3 checkpoints" in done.stdout.splitlines()[0]
    assert [row[0] for row in rows] == ["300", "200", "100"]
    assert "val_loss=1.5" in rows[1] and "pinned: before the new data" in done.stdout
    assert "hint: `buoy ckpt verify" in done.stderr


def test_metrics_that_are_left_out_of_the_list_leave_a_sign() -> None:
    rows = [
        Entry(step, "x", None, 1, {"metrics": dict.fromkeys(names, 0.5)}, True)
        for step, names in ((2, "abcd"), (1, "abc"))
    ]
    _, _, four, three = listed("run", rows, {}).splitlines()

    assert "a=0.5 b=0.5 c=0.5 …" in four and "c=0.5" in three and "…" not in three


def test_damaged_ones_are_not_counted_as_checkpoints(run: Path) -> None:
    flip(run, 300, "manifest.json", 12)
    one = ckpt("list", run)
    for step in (100, 200):
        flip(run, step, "manifest.json", 12)
    none = ckpt("list", run)

    assert one.stdout.startswith(f"{run}: 2 complete, ") and "; 1 damaged\n" in one.stdout
    assert none.stdout.startswith(f"{run}: 0 good, 3 damaged\n") and "buoy ckpt restore" in none.stderr


def test_without_a_word_it_tells_what_it_can_do_and_gives_an_example() -> None:
    done = ckpt()

    assert done.returncode == 0 and done.stderr == ""
    assert all(
        f"\n  {word} " in done.stdout for word in ("list", "verify", "show", "export", "prune", "restore")
    )
    assert "for example: buoy ckpt list runs/cats" in done.stdout


def test_a_number_is_a_run_where_there_is_such_a_folder(run: Path) -> None:
    run.rename(run.parent / "7")

    assert ckpt("list", "7", cwd=run.parent).stdout.startswith("7: 3 checkpoints")
    assert ckpt("show", "7", 200, cwd=run.parent).stdout.startswith("step 200")


def test_list_as_json_is_for_programs_and_alone_on_stdout(run: Path) -> None:
    value = json.loads(ckpt("list", run, "--format", "json").stdout)

    assert value["schema"] == "buoy.checkpoints/1" and value["mirror"] is None
    assert [(item["step"], item["complete"], item["about"]["epoch"]) for item in value["checkpoints"]] == [
        (300, True, 3), (200, True, 2), (100, True, 1),
    ]  # fmt: skip


def test_the_newest_run_below_the_working_directory_is_meant_by_default(run: Path) -> None:
    assert ckpt("list", cwd=run.parent.parent).stdout.startswith("runs/cats: 3 checkpoints")
    assert ckpt("list", cwd=run).stdout.startswith(".: 3 checkpoints")


def test_verify_reads_every_byte_and_exits_1_on_damage_naming_file_and_tensor(run: Path) -> None:
    assert ckpt("verify", run).returncode == 0
    flip(run, 200, "state.safetensors")
    done = ckpt("verify", run)
    as_json = ckpt("verify", run, "--format", "json")

    assert done.returncode == as_json.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 300: good") and lines[2].startswith("step 100: good")
    assert lines[1].startswith("step 200: damaged: state.safetensors") and "model/weights" in lines[1]
    assert "resumes from step 300, the newest good one" in done.stderr
    assert [item["good"] for item in json.loads(as_json.stdout)["checkpoints"]] == [True, False, True]
    assert ckpt("verify", run, 300).returncode == 0 and ckpt("verify", run, 200).returncode == 1


@pytest.mark.parametrize("file", ["manifest.json", "values.json"])
def test_verify_sees_damage_in_the_small_files_too(run: Path, file: str) -> None:
    flip(run, 300, file, 12)
    done = ckpt("verify", run)

    assert done.returncode == 1 and f"step 300: damaged: {file}" in done.stdout


def test_show_tells_what_is_in_one(run: Path) -> None:
    text = ckpt("show", run, 200).stdout
    value = json.loads(ckpt("show", run, "--format", "json").stdout)

    assert "step 200" in text and "val_loss=1.5" in text and "39.1 KiB" in text
    assert any(line.split()[:3] == ["model/weights", "F64", "5000"] for line in text.splitlines())
    assert value["step"] == 300 and value["names"] == ["model", "counter"]
    assert value["tensors"] == [{"name": "model/weights", "dtype": "F64", "shape": [5000], "bytes": 40000}]


def test_the_folder_of_one_checkpoint_may_be_named(run: Path) -> None:
    assert (
        json.loads(ckpt("show", run / "checkpoints" / "step-000000100", "--format", "json").stdout)["step"]
        == 100
    )


def test_export_writes_weights_that_the_safetensors_library_reads(run: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "weights.safetensors"
    done = ckpt("export", run, 200, "-o", path)

    assert done.returncode == 0 and "model of step 200, 1 tensor" in done.stdout
    with safetensors.safe_open(path, "np") as file:
        assert list(file.keys()) == ["weights"]  # without the prefix of what it was saved as
        assert set(file.get_tensor("weights").tolist()) == {200.0}
    assert sorted(os.listdir(tmp_path)) == ["runs", "weights.safetensors"]  # nothing half-written beside it


def test_a_tied_weight_is_exported_under_each_of_its_names(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    code = """
import sys
from tests.training.loop import *
with kept(sys.argv[1]) as keeper:
    tied = array("d", [7.0])
    keeper.save({"model": {"embed.weight": tied, "head.weight": tied}}, step=1, epoch=0, reason="user",
                as_tensor=as_tensor, wait=True)
"""
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=400, capture_output=True
    )
    path = tmp_path / "w.safetensors"

    assert ckpt("export", tmp_path / "run", "-o", path).returncode == 0
    with safetensors.safe_open(path, "np") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118 - no mapping
            "embed.weight": [7.0], "head.weight": [7.0],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export"], "no file to export to"),
        (["export", "-o", "w.pt"], "unknown format"),
        (["export", "-o", "w.h5"], "Keras would not load this name"),
        (["export", "-o", "w.safetensors", "--only", "ema"], "one of model, counter"),
        (["export", "-o", "w.safetensors", "--only", "counter"], "'counter' has no tensors"),
        (["export", "-o", "/proc/w.safetensors"], "cannot write the weights"),
        (["export", "-o", "checkpoints/step-000000300/state.safetensors"], "among a run's checkpoints"),
        (["export", "-o", "checkpoints/w.weights.h5"], "among a run's checkpoints"),
        (["list", "s3://bucket/cats"], "`buoy ckpt restore s3://bucket/cats --to DIR`"),
        (
            ["export", "s3://bucket/cats", "300", "-o", "w.safetensors"],
            "only `buoy ckpt restore` reads a URL",
        ),
        (["prune", "--keep", "1", "--best", "val_los", "--yes"], "one of val_loss"),
        (["show", "250"], "the nearest are 200, 300, 100"),
        (["show", ".", "checkpoints"], "one run at a time"),
        (["show", ".", "100", "200"], "one run and one step at a time"),
        (["show", ".", "-3"], "this is not a step"),
        (["show", "-3"], "this is not a step"),
        (["show", ".", "1.5"], "this is not a step"),
        (["verify", ".", "abc", "--format", "json"], "this is not a step"),
        (["export", ".", "²", "-o", "w.safetensors"], "this is not a step"),
        (["list", ".", "100"], "`buoy ckpt show . 100`"),
        (["prune", ".", "100", "--yes"], "`--keep N` says how many stay"),
        (["list", "--keep", "4"], "--keep is for `buoy ckpt prune`"),
        (["show", "--yes"], "--yes is for `buoy ckpt prune`"),
        (["prune", "--to", "x"], "--to is for `buoy ckpt restore`"),
        (["export", "-o", "w.weights.h5", "--only", "model"], "a .weights.h5 file holds the model"),
        (["shwo"], "did you mean `show`?"),
        (["prune", "--keep", "0", "--yes"], "--keep 0"),
        (["prune", "--keep", "many", "--yes"], "--keep"),
        (["prune", "--keep", "1"], "add `--yes`"),
        (["prune", "--keep", "1", "--format", "json"], "1 of 3 (steps 200)"),
        (["--format", "json"], "buoy ckpt --help"),
        (["restore"], "one mirror to restore from"),
        (["restore", "nowhere/cats"], "no checkpoints in this mirror"),
        (["restore", ".", "-5"], "this is not a step"),
        (["restore", ".", "abc"], "this is not a step"),
        (["restore", ".", "1", "2"], "one mirror to restore from"),
        (["restore", "s3://bucket"], "which run of this mirror?"),
    ],
)
def test_bad_input_is_answered_in_words_and_with_exit_2(
    made: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - closed with the test
    code = main(["ckpt", *words])

    shown = capsys.readouterr()
    assert code == 2 and said in shown.err and "hint:" in shown.err and shown.out == ""


def test_a_folder_that_is_no_run_or_has_none_is_told_with_what_there_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "dogs").mkdir()

    assert "there are: cats" in ckpt("list", tmp_path / "runs" / "cast").stderr
    assert "this run has no checkpoint" in ckpt("list", tmp_path / "runs" / "dogs").stderr
    assert "no run with checkpoints found" in ckpt("list", cwd=tmp_path / "runs" / "dogs").stderr


def test_prune_keeps_the_pinned_the_best_and_the_last(run: Path) -> None:
    done = ckpt("prune", run, "--keep", 1, "--best", "val_loss", "--yes")
    assert done.returncode == 0 and "nothing removed; 3 stay" in done.stdout
    done = ckpt("prune", run, "--keep", 1, "--yes", "--format", "json")

    assert json.loads(done.stdout)["removed"] == [200]
    assert [entry.step for entry in Store(str(run)).list()] == [300, 100]


def test_prune_that_has_to_stop_tells_what_is_gone_already(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    flip(tmp_path, 3, "state.safetensors")
    done = ckpt("prune", tmp_path, "--keep", 1, "--yes")

    assert done.returncode == 2 and "removed before that: step 1\n" in done.stderr
    assert "is the last good checkpoint of this run" in done.stderr
    assert [entry.step for entry in Store(str(tmp_path)).list()] == [3, 2]


def test_restore_brings_the_newest_good_one_out_of_a_mirror(run: Path, tmp_path: Path) -> None:
    """A run folder has the same shape as its copy in a mirror."""
    flip(run, 300, "state.safetensors")
    done = ckpt("restore", run, "--to", tmp_path / "back")
    old = ckpt("restore", run, 100, "--to", tmp_path / "back", "--format", "json")
    none = ckpt("restore", run, 150, "--to", tmp_path / "back")

    assert done.returncode == 0 and "step 300 in the mirror is damaged" in done.stderr
    assert "step 200 is in" in done.stdout and "resumes from it" in done.stdout
    assert json.loads(old.stdout)["step"] == 100
    assert none.returncode == 1 and "has no good checkpoint of step 150" in none.stderr
    assert [entry.step for entry in Store(str(tmp_path / "back")).list()] == [200, 100]


def test_what_is_there_already_is_not_restored_a_second_time(run: Path, tmp_path: Path) -> None:
    first = ckpt("restore", run, 200, "--to", tmp_path / "back")
    again = ckpt("restore", run / "checkpoints" / "step-000000200", "--to", tmp_path / "back")
    once = [entry.step for entry in Store(tmp_path / "back").list()]
    flip(tmp_path / "back", 200, "state.safetensors")
    mended = ckpt("restore", run, 200, "--to", tmp_path / "back")

    assert "step 200 is in" in first.stdout
    assert again.returncode == 0 and "step 200 was already in" in again.stdout and once == [200]
    assert again.stderr == ""
    assert "step 200 is in" in mended.stdout, "a damaged one is not there"
    assert len(Store(tmp_path / "back").list()) == 2


def test_a_damaged_one_is_told_apart_from_the_last_one_that_is_damaged(run: Path) -> None:
    flip(run, 300, "state.safetensors")
    one = ckpt("show", run)
    shutil.rmtree(run / "checkpoints" / "step-000000100")
    shutil.rmtree(run / "checkpoints" / "step-000000200")
    last = ckpt("show", run)

    assert "the run resumes from the newest good one" in one.stderr
    assert last.returncode == 2 and "no other is left here" in last.stderr and "is used" not in last.stderr


def test_restore_of_an_older_step_says_what_a_training_makes_of_it(run: Path, tmp_path: Path) -> None:
    """The newest wins, here or in the mirror: to go back on purpose takes a folder of another name."""
    same = ckpt("restore", run, 100, "--to", tmp_path / "fresh" / run.name)
    other = ckpt("restore", run, 100, "--to", tmp_path / "fresh" / f"{run.name}-from-100")
    both = ckpt("restore", run, "--to", tmp_path / "fresh" / f"{run.name}-from-100")
    back = ckpt("restore", run, 100, "--to", tmp_path / "fresh" / f"{run.name}-from-100")

    assert (
        f"resumes from it without a mirror, and from step 300 with the mirror {run.parent}\n" in same.stdout
    )
    assert f"buoy ckpt restore {run} 100 --to" in same.stderr and f"{run.name}-from-100`" in same.stderr
    assert other.stdout.endswith("; training in this folder resumes from it\n") and not other.stderr.count(
        "hint"
    )
    assert both.stdout.endswith("; training in this folder resumes from it\n")
    assert "which has newer ones too: training in it resumes from step" in back.stdout


def test_a_restore_into_itself_says_that_it_is_there_and_how_to_go_back(run: Path) -> None:
    """Nobody has named a mirror: the answer does not speak of one that is wrong."""
    older = ckpt("restore", run, 100, "--to", run)
    newest = ckpt("restore", run, "--to", run, "--format", "json")
    missing = ckpt("restore", run, 150, "--to", run)
    above = ckpt("restore", run, 100, "--to", run.parent)
    back = ckpt("restore", run, 100, "--to", f"{run}-from-100")
    flip(run, 100, "state.safetensors")
    damaged = ckpt("restore", run, 100, "--to", run)

    assert older.returncode == 0 and f"step 100 is already in {run}, which has newer ones too" in older.stdout
    assert f"`buoy ckpt restore {run} 100 --to {run}-from-100`" in older.stderr
    assert newest.returncode == 0 and json.loads(newest.stdout)["step"] == 300
    assert missing.returncode == 1 and "no good checkpoint of step 150" in missing.stderr
    assert above.returncode == 2 and "a folder that holds it" in above.stderr
    assert back.returncode == 0
    assert damaged.returncode == 1 and "no good checkpoint of step 100" in damaged.stderr


def test_a_restore_that_brings_nothing_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    none = ckpt("restore", run, "--to", tmp_path / "new" / "back", 150, "--format", "json")
    for step in (100, 200, 300):
        flip(run, step, "manifest.json", 12)
    (tmp_path / "mine").mkdir()
    damaged = ckpt("restore", run, "--to", tmp_path / "mine" / "back")

    assert none.returncode == damaged.returncode == 1
    assert json.loads(none.stdout)["step"] is None and "has no good checkpoint of step 150" in none.stderr
    assert not (tmp_path / "new").exists() and list((tmp_path / "mine").iterdir()) == []


def test_a_closed_pipe_and_the_help_are_no_trouble(run: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m buoy ckpt show {run} | head -1", shell=True, capture_output=True, text=True
    )

    assert done.stderr == "" and done.stdout.startswith("step 300")
    assert "restore  MIRROR/RUN" in ckpt("--help").stdout


def test_nothing_is_restored_under_a_training_that_writes_there(run: Path, tmp_path: Path) -> None:
    training = Store(tmp_path / "busy").saver(print, lambda kind, **values: None)
    done = ckpt("restore", run, "--to", tmp_path / "busy")
    training.close()

    assert done.returncode == 2 and "another process is writing the checkpoints" in done.stderr
    assert Store(tmp_path / "busy").list() == []


BAD = "\x1b]0;owned\x07\x9b31m\n::error::owned"
"""A title for the window, a colour, and a line that a CI service obeys."""


@pytest.mark.parametrize("action", ["list", "show", "verify", "export", "prune", "restore"])
def test_what_a_checkpoint_says_gives_a_terminal_no_orders(action: str, run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "step-000000300"
    values = json.loads((folder / "values.json").read_bytes())
    about = {"step": 300, "reason": BAD, "pin": BAD, "time": 1.79e9, "metrics": {BAD: 1.0}}
    forge(folder, {**values, BAD: 3}, about=about, versions={BAD: BAD})
    (run / "mirror.json").write_text(
        json.dumps({"home": BAD, "newest": 3, "trouble": BAD, "newest_safe": 1.0})
    )
    named = tmp_path / f"a{BAD.replace('/', '')}"
    run.rename(named)
    for words in (
        [action, str(named)],
        [action, str(tmp_path / f"{BAD}-not-there")],
        [action, str(named), BAD],
    ):
        done = ckpt(*words, *(["-o", str(tmp_path / f"{BAD}.safetensors")] if action == "export" else []))
        told = done.stdout + done.stderr

        assert "Traceback" not in told
        assert not [sign for sign in told if not sign.isprintable() and sign != "\n"], ascii(told)
        assert not [line for line in told.splitlines() if line.strip().startswith("::")], told


def test_a_manifest_of_another_step_is_damage(run: Path, tmp_path: Path) -> None:
    for step, said in ((300, 10**30), (200, 7)):
        forge(run / "checkpoints" / f"step-{step:09d}", step=said)

    listed = ckpt("list", run).stdout
    verified = ckpt("verify", run)
    restored = ckpt("restore", run, "--to", tmp_path / "back")

    assert "1 complete" in listed and "2 damaged" in listed
    assert "step 300: damaged: manifest.json: no step number" in verified.stdout
    assert "step 200: damaged: manifest.json: it belongs to step 7" in verified.stdout
    assert restored.returncode == 0 and "step 100 is in" in restored.stdout
    assert "step 200 in the mirror is damaged (manifest.json: it belongs to step 7)" in restored.stderr


def test_figures_that_no_number_can_hold_are_not_available(run: Path) -> None:
    huge = {"$": "int", "v": "f" * 5000}
    nan = {"$": "float", "v": "7ff8000000000000"}
    metrics = {"huge": huge, "nan": nan, "text": "x", "set": {"$": "set", "v": [1]}}
    forge(run / "checkpoints" / "step-000000300",
          about={"step": 300, "reason": huge, "time": huge, "epoch": huge, "metrics": metrics})  # fmt: skip

    assert "huge=n/a nan=nan text=n/a" in ckpt("list", run).stdout
    assert "nan=nan" in ckpt("show", run).stdout
    for action in ("list", "show", "verify"):
        json.loads(ckpt(action, run, "--format", "json").stdout, parse_constant=pytest.fail)
    assert "Traceback" not in buoy("runs", str(run.parent)).stderr
