"""A second user of the same machine reads nothing of a training, and makes it overwrite nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buoy.errors import RunFolderError
from buoy.training.manager import CheckpointManager
from tests.checkpoint.ground import ROOT, save
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")

ANOTHER = 54321
TRAINING = """
import os, sys
from tests.training.loop import train
def each(step):
    if step == 25: print("paused", flush=True); sys.stdin.readline()
os.umask(0o022)
train(sys.argv[1], mirror=sys.argv[2], steps=40, save=10, keep=2, pause=0.02, each=each)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can write to, as /tmp is: those of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="buoy-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_another(act: Callable[[], Any]) -> Any:
    """What this comes to for the second user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(ANOTHER)
            os.setuid(ANOTHER)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        answer = told.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def readable(folders: list[str]) -> list[str]:
    """Every file that can be opened, however far down."""
    found = []
    for folder in folders:
        for above, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(above, name)
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                    found.append(path)
                except OSError:
                    continue
    return found


def start(run: Path, mirror: Path, shared: Path) -> subprocess.Popen[str]:
    (shared / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(shared / "temporary")}
    command = [sys.executable, "-c", TRAINING, str(run), str(mirror)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **streams)  # type: ignore[call-overload, no-any-return]


def of_this(run: Path) -> list[int]:
    """The processes of a run: itself, the sidecar, the writer, the mirror's."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            opened = [os.readlink(f"/proc/{name}/fd/{each}") for each in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if str(run).encode() in words or any(each.startswith(str(run)) for each in opened):
            found.append(int(name))
    return found


def named_sockets(pids: list[int]) -> list[str]:
    """The names under which others could reach a socket of these processes."""
    numbers = set()
    for pid in pids:
        for each in os.listdir(f"/proc/{pid}/fd"):
            kind, _, number = os.readlink(f"/proc/{pid}/fd/{each}").partition(":[")
            numbers |= {number.rstrip("]")} if kind == "socket" else set()
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if line[6] in numbers and len(line) > 7]


def test_nothing_of_a_training_is_readable_by_another_user(shared: Path) -> None:
    """In a run folder that a person made open to all, in the mirror, in temporary and shared memory."""
    run, drive = shared / "run", shared / "drive"
    for folder in (run, drive):
        folder.mkdir(mode=0o755)
    memory = set(os.listdir("/dev/shm"))
    training = start(run, drive, shared)
    assert training.stdout is not None
    while "paused" not in (line := training.stdout.readline()):
        assert line, training.communicate()[1]
    wait_until(lambda: list(drive.rglob("manifest.json")), "a copy")
    pids = of_this(run)
    doors = [f"/proc/{pid}/{door}" for pid in pids for door in ("fd", "map_files", "task")]
    during = as_another(lambda: readable([str(shared), "/dev/shm"]))
    opened = as_another(lambda: [path for path in readable(doors) if "/fd/" in path or "/map_files/" in path])
    sockets = named_sockets(pids)
    out, err = training.communicate("\n", timeout=400)
    wait_until(lambda: not of_this(run), "the end of every process")

    assert len(pids) >= 4, "the training, its sidecar, its writer and its mirror"
    assert [path for path in during if os.path.basename(path) not in memory] == []
    assert opened == [] and sockets == []
    assert out.endswith("finished\n"), err
    assert len(list(drive.rglob("*"))) > 20
    assert as_another(lambda: readable([str(shared)])) == []


PARTS = (
    "owner.json.part",
    "run.json.part",
    "attempts/0001/attempt.json.part",
    "attempts/0001/events.jsonl.part",
    "attempts/0001/samples-tail.jsonl.part",
    "checkpoints/step-000000010/state.safetensors.part",
    "checkpoints/step-000000010/manifest.json.part",
)


@pytest.mark.parametrize(
    ("owner", "links"),
    [
        (ANOTHER, PARTS),
        (0, PARTS),
        (ANOTHER, ("",)),
        (0, ("attempts",)),
        (0, ("checkpoints",)),
    ],
    ids=["their folder", "an open folder", "the run", "attempts", "checkpoints"],
)
def test_links_that_another_user_put_into_a_mirror_lead_nowhere(
    owner: int, links: tuple[str, ...], shared: Path
) -> None:
    """`owner`: of the run's folder there; with umask 0 one of our own is open to everybody."""
    secret, mine, there = shared / "secret", shared / "mine", shared / "drive" / "run"
    secret.write_text("mine")
    secret.chmod(0o600)
    mine.mkdir(mode=0o700)
    there.parent.mkdir()
    there.parent.chmod(0o1777)
    if not owner:
        there.mkdir()
        there.chmod(0o777)

    def plant() -> None:
        for link in links:
            path = there / link
            path.parent.mkdir(mode=0o777, parents=True, exist_ok=True)
            path.symlink_to(secret if path.suffix == ".part" else mine)

    as_another(plant)
    training = start(shared / "here" / "run", there.parent, shared)
    out, err = training.communicate("\n", timeout=400)
    wait_until(lambda: not of_this(shared / "here" / "run"), "the end of every process")

    assert out.endswith("finished\n") or "the mirror cannot be read" in err, err
    assert secret.read_text() == "mine" and secret.stat().st_mode & 0o777 == 0o600
    assert os.listdir(mine) == []


@pytest.mark.parametrize("theirs", ["", "checkpoints"])
def test_a_run_folder_of_another_user_is_not_resumed_from(theirs: str, shared: Path) -> None:
    run = shared / "run"
    save(run, 7)
    for path in [run / theirs, *(run / theirs).rglob("*")]:
        os.chown(path, ANOTHER, ANOTHER)
    before = {path: path.is_file() and path.read_bytes() for path in run.rglob("*")}

    with pytest.raises(RunFolderError) as refused:
        CheckpointManager(str(run))
    assert refused.value.received == f"{run / theirs} (owned by user {ANOTHER})"
    assert {path: path.is_file() and path.read_bytes() for path in run.rglob("*")} == before
