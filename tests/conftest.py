"""How tests are run, whoever starts them; and real ground for them: small file systems and memory groups."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import die_as_usual, wait_until


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="K/N", type=_share, help="of the chosen tests every Nth only, from the Kth on"
    )


def _share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"received {text!r}, expected K/N with K from 1 to N, such as 2/3")
    return int(number), int(of)


@pytest.hookimpl(tryfirst=True)  # before workers are started
def pytest_configure() -> None:
    """However they were started: by `nohup`, with `&`, or under a `buoy run`."""
    die_as_usual()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in [name for name in os.environ if name.startswith("BUOY_")]:
        del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a thousand processes would compile buoy each
    sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core, since half of the time tests wait for processes to live and die."""
    return min(2 * len(os.sched_getaffinity(0)), 8)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A share takes functions whole, with all their parameters: most have a fixture that is worth it."""
    share = config.getoption("--share")
    if share is None:
        return
    number, of = share
    functions = sorted({_function(item) for item in items})
    chosen = set(functions[number - 1 :: of])
    config.hook.pytest_deselected(items=[item for item in items if _function(item) not in chosen])
    items[:] = [item for item in items if _function(item) in chosen]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture(autouse=True)
def nothing_is_recorded_after_a_test() -> Iterator[None]:
    """A test that lets buoy record the very process of the tests changes what `buoy why` says to all that follow."""
    yield
    module = sys.modules.get("buoy.flight.recorder")
    recorder = module.current() if module is not None else None
    if recorder is not None and recorder.attempt is not None:
        module._forget()  # type: ignore[union-attr]
        pytest.fail(f"this test's process is still recorded in {recorder.folder}")


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size; skips in words where that is not allowed."""
    mounts: list[Path] = []

    def make(size: str) -> Path:
        mount = tmp_path / f"disk{len(mounts)}"
        mount.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
        mounts.append(mount)
        return mount

    yield make
    for mount in mounts:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def make_session() -> Iterator[Callable[[int], Path]]:
    """Makes a memory cgroup (v1) of so many bytes; skips in words where that is not allowed."""
    groups: list[Path] = []

    def make(limit: int) -> Path:
        group = Path("/sys/fs/cgroup/memory") / f"buoy-test-{os.getpid()}-{len(groups)}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no memory cgroup (v1) can be made here: {error.strerror}")
        groups.append(group)
        (group / "memory.limit_in_bytes").write_text(str(limit))
        return group

    yield make
    for group in groups:
        wait_until(lambda group=group: _is_removed(group), "the end of all in the session")


def _is_removed(group: Path) -> bool:
    """A recorder outlives what it recorded by a moment."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


class MountedDrive:
    """A drive as Google's is: FUSE, one owner for all files, no modes, no links (`tests/drive.py`)."""

    def __init__(self, mount: Path, uid: int, hangs_at: str) -> None:
        self.path = mount
        command = [sys.executable, "-m", "tests.drive", str(mount), str(uid), hangs_at]
        self._server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )
        assert self._server.stdout is not None
        with self._server.stdout as told:
            self.answer = told.readline().strip()

    def unmount(self) -> None:
        """Leave the bare mount point; whoever hung gets an error."""
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        self._server.kill()
        self._server.wait()


@pytest.fixture
def make_drive(tmp_path: Path) -> Iterator[Callable[..., MountedDrive]]:
    """Mounts a drive; skips in words where that is not allowed."""
    drives: list[MountedDrive] = []

    def make(uid: int = 0, hangs_at: str = "") -> MountedDrive:
        mount = tmp_path / f"drive{len(drives)}"
        mount.mkdir()
        if not os.access("/dev/fuse", os.W_OK):
            pytest.skip("there is no /dev/fuse to mount a drive with")
        drive = MountedDrive(mount, uid, hangs_at)
        drives.append(drive)
        if drive.answer != "mounted":
            pytest.skip(f"cannot mount a drive here: {drive.answer}")
        return drive

    yield make
    for drive in drives:
        drive.unmount()


@pytest.fixture
def make_quota() -> Iterator[Callable[[float], Path]]:
    """Makes a CPU cgroup (v1) that may use so many cores; skips in words where that is not allowed."""
    groups: list[Path] = []

    def make(cores: float) -> Path:
        group = Path("/sys/fs/cgroup/cpu") / f"buoy-test-{os.getpid()}-{len(groups)}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no CPU cgroup (v1) can be made here: {error.strerror}")
        groups.append(group)
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
        return group

    yield make
    for group in groups:
        wait_until(lambda group=group: _is_removed(group), "the end of all under the quota")
