"""Files are written whole or not at all, for one user alone, and never through a link that somebody put there."""

from __future__ import annotations

import ast
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.machine import disk, files
from buoy.machine import files as records
from buoy.machine.disk import SharedFolder
from tests.conftest import MountedDrive

PACKAGE = Path(__file__).parents[2] / "src" / "buoy"
ANOTHER = 54321


def fill(folder: Path, leave: int) -> None:
    """Fill the disk but for so many pages."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - 4096 * leave)


def test_what_a_full_disk_takes_only_a_part_of_replaces_nothing(make_disk: Callable[[str], Path]) -> None:
    """The kernel takes the first bytes without an error, and says only of the next that there is no room."""
    folder = make_disk("256k")
    records.write_json(str(folder / "run.json"), {"schema": "buoy.run/1"})
    fill(folder, leave=2)

    with pytest.raises(OSError, match="No space left"):
        records.write_json(str(folder / "run.json"), {"schema": "buoy.run/1", "recorded": ["x" * 100] * 500})
    assert json.loads((folder / "run.json").read_text()) == {"schema": "buoy.run/1"}
    assert sorted(os.listdir(folder)) == ["filler", "run.json"]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of one's own that a link points to."""
    path = tmp_path / "secret"
    path.write_text("mine")
    return path


def links(folder: Path, *names: str) -> Callable[[Path], None]:
    def plant(to: Path) -> None:
        for name in names:
            (folder / name).symlink_to(to)

    return plant


def test_a_link_in_the_place_of_a_file_is_never_written_through(tmp_path: Path, secret: Path) -> None:
    where = tmp_path / "shared"
    where.mkdir()
    links(where, "run.json", f"run.json.{os.getpid()}.part", "events.jsonl", "new")(secret)

    records.write_json(str(where / "run.json"), {"whole": True})
    for refused in (
        lambda: files.append(str(where / "events.jsonl"), "line\n"),
        lambda: files.open_new(str(where / "new")),
        lambda: files.open_new(str(where / "new"), again=True),
        lambda: files.write_new(str(where / "new"), b""),
    ):
        with pytest.raises(OSError) as error:
            refused()
        assert error.value.errno in (errno.ELOOP, errno.EEXIST)

    assert secret.read_text() == "mine"
    assert not (where / "run.json").is_symlink() and json.loads((where / "run.json").read_text())


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")

    with pytest.raises(OSError):
        files.append(str(tmp_path / "events.jsonl"), "line\n")
    with pytest.raises(OSError, match="not a plain file"):
        files.read_bounded(str(tmp_path / "events.jsonl"), 10)


def test_what_is_new_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SharedFolder(str(tmp_path / "drive"), "run").write("attempts/0001/events.jsonl", b"{}")
        files.append(str(tmp_path / "lines"), "x\n")
        files.make_folder(str(tmp_path / "runs" / "cats"))
    finally:
        os.umask(before)

    modes = {
        str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*")
    }
    assert modes == {
        "drive": "0o777", "drive/run": "0o700", "drive/run/attempts": "0o700", "drive/run/attempts/0001": "0o700",
        "drive/run/attempts/0001/events.jsonl": "0o600", "lines": "0o600", "runs": "0o777", "runs/cats": "0o700",
    }  # fmt: skip


@pytest.mark.parametrize("link", ["run", "run/attempts", "run/attempts/0001"])
def test_a_folder_of_a_mirror_that_is_a_link_is_refused_in_words(tmp_path: Path, link: str) -> None:
    mine, where = tmp_path / "mine", tmp_path / "drive"
    mine.mkdir()
    (where / link).parent.mkdir(parents=True)
    (where / link).symlink_to(mine)
    tree = SharedFolder(str(where), "run")

    with pytest.raises(NotADirectoryError) as error:
        tree.write("attempts/0001/events.jsonl", b"{}")
    assert error.value.strerror == f"{os.path.basename(link)} there is a link or a file, not a folder"
    with pytest.raises(NotADirectoryError):
        tree.read("attempts/0001/events.jsonl", 10)
    assert not os.listdir(mine)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    os.chown(tmp_path / "run" / "checkpoints", ANOTHER, ANOTHER)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    os.chown(tmp_path / "link", ANOTHER, ANOTHER, follow_symlinks=False)
    tree = SharedFolder(str(tmp_path), "run")

    with pytest.raises(PermissionError) as error:
        tree.write("checkpoints/step-000000001/manifest.json", b"{}")
    assert error.value.strerror == f"checkpoints there is owned by user {ANOTHER}"
    assert files.foreign(str(tmp_path / "run" / "checkpoints")) == f"owned by user {ANOTHER}"
    assert files.foreign(str(tmp_path / "link")) == f"a link of user {ANOTHER}"
    assert files.foreign(str(tmp_path / "run")) is files.foreign(str(tmp_path / "nowhere")) is None
    assert not os.listdir(tmp_path / "run" / "checkpoints"), "the look leaves nothing behind"


def test_a_drive_without_modes_owners_and_links_is_written_as_ever(
    make_drive: Callable[..., MountedDrive],
) -> None:
    """As vfat mounted for another user: all that we make there is that user's too."""
    drive = make_drive(uid=ANOTHER)
    tree = SharedFolder(str(drive.path), "run", disk.mount_apart(str(drive.path), "/"))
    tree.write("attempts/0001/events.jsonl", b"{}", sync=True)
    tree.write("attempts/0001/events.jsonl", b"{}{}")

    assert (drive.path / "run").stat().st_uid == ANOTHER
    assert tree.read("attempts/0001/events.jsonl", 10) == b"{}{}"
    assert files.foreign(str(drive.path / "run")) is None
    assert [path.name for path in drive.path.rglob("*")] == ["run", "attempts", "0001", "events.jsonl"]


def test_nothing_is_written_where_a_drive_was_mounted(make_drive: Callable[..., MountedDrive]) -> None:
    drive = make_drive()
    tree = SharedFolder(str(drive.path), "run", disk.mount_apart(str(drive.path), "/"))
    tree.write("run.json", b"{}")
    drive.unmount()

    with pytest.raises(OSError, match="no longer mounted"):
        tree.write("run.json", b"{}")
    assert not os.listdir(drive.path)


def opens_by_itself(call: ast.Call) -> bool:
    """Whether this reads, makes or changes a file or a folder by other means than `machine.files`."""
    name = ast.unparse(call.func)
    if name == "open":
        return not ast.unparse(call.args[0]).startswith("'/proc/")
    if name == "os.open":
        return "O_CREAT" in ast.unparse(call) or "O_RDWR" in ast.unparse(call)
    return name in ("os.makedirs", "os.truncate") or name.endswith((".write_text", ".write_bytes"))


@pytest.mark.parametrize("room", ["checkpoint", "flight", "supervisor", "training", "verdict", "view"])
def test_the_rooms_that_use_run_folders_and_mirrors_do_so_through_this_module(room: str) -> None:
    allowed = {
        "export.py": "a file that a person named",
        "mirror.py: os.makedirs(where, exist_ok=True)": "the place that a user named",
        "launch.py: open(path, 'rb')": "the script that a person named",
        "report.py: open(os.path.join(os.path.dirname(__file__)": "a part of buoy",
        "sitecustomize.py": "loaded where buoy may not be",
        "mirror.py: os.open(os.devnull, os.O_RDWR)": "nothing",
    }
    found = [
        f"{path.name}: {ast.unparse(node)}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens_by_itself(node)
    ]

    assert [each for each in found if not each.startswith(tuple(allowed))] == []
