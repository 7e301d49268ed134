"""Runs a command in this checkout as most people run it: an ordinary user, or root in a plain container.

    python scripts/ordinary_user.py [--uid N] -- COMMAND

No capability, control groups that cannot be written, no kernel log. Everything happens in mounts of the command's own,
which vanish with it. The user gets a copy of the checkout, seen at the checkout's own path: `.venv` works in it.
Whoever is not root is an ordinary user already: the command is run as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
import tempfile

CHECKOUT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOBODY = 65534
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--uid", type=int, default=NOBODY, help=f"0: root without capabilities (default: {NOBODY})"
    )
    parser.add_argument(
        "--inside", metavar="DIR", help=argparse.SUPPRESS
    )  # the second half, in mounts of its own
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    if asked.inside:
        hide_privileges(asked.inside, asked.uid)
        os.chdir(CHECKOUT)
        os.execvp("setpriv", [*without_privileges(asked.uid), *asked.command])
    if os.geteuid() != 0:
        print(f"already an ordinary user (uid {os.geteuid()}): the command runs as it is", flush=True)
        return subprocess.run(asked.command, cwd=CHECKOUT).returncode
    scratch = tempfile.mkdtemp(prefix="ordinary-user-")
    os.chmod(scratch, 0o755)
    try:
        again = [sys.executable, os.path.abspath(__file__), "--uid", str(asked.uid), "--inside", scratch]
        return subprocess.run(["unshare", "--mount", *again, "--", *asked.command]).returncode
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def without_privileges(uid: int) -> list[str]:
    return [
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all",
        "--bounding-set=-all", "--no-new-privs", "--",
    ]  # fmt: skip


def hide_privileges(scratch: str, uid: int) -> None:
    copy, home, temporary, unreadable = (
        os.path.join(scratch, name) for name in ("copy", "home", "tmp", "unreadable")
    )
    shutil.copytree(CHECKOUT, copy, symlinks=True, ignore=NOT_COPIED)
    for folder in (os.path.join(copy, ".venv"), home, temporary):
        os.mkdir(folder)
    for folder in (copy, home, temporary):
        own_all(folder, uid)
    os.environ.update(HOME=home, TMPDIR=temporary, USER="ordinary", LOGNAME="ordinary")
    os.close(os.open(unreadable, os.O_CREAT, 0))
    if os.path.exists("/dev/kmsg"):
        mount("--bind", unreadable, "/dev/kmsg")
    for place in control_groups():
        mount("-o", "remount,bind,ro", place)
    mount("--bind", os.path.join(CHECKOUT, ".venv"), os.path.join(copy, ".venv"))
    open_ways(scratch, {CHECKOUT: copy, **{folder: folder for folder in pythons_folders()}})


def own_all(top: str, uid: int) -> None:
    for folder, _, files in os.walk(top):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            os.chown(path, uid, uid, follow_symlinks=False)


def control_groups() -> list[str]:
    with open("/proc/self/mounts") as file:
        places = [line.split()[1] for line in file]
    return [place for place in places if place.startswith("/sys/fs/cgroup")]


def pythons_folders() -> list[str]:
    """Where this interpreter and its packages are, outside of the checkout."""
    folders = {sys.base_prefix, *(path for path in sys.path if os.path.isdir(path))}
    inside = (CHECKOUT + "/", sys.base_prefix + "/lib")
    return sorted(folder for folder in folders if not (folder + "/").startswith(inside))


def open_ways(scratch: str, sources: dict[str, str]) -> None:
    """Show each folder at its path, though a folder above it (such as /root) may be closed to others."""
    held = {}
    for number, (path, source) in enumerate(sources.items()):
        held[path] = os.path.join(scratch, str(number))
        os.mkdir(held[path])
        mount("--rbind", source, held[path])
    for closed in sorted({top for path in sources if (top := highest_closed(path))}):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed)
    for path in sources:
        os.makedirs(path, exist_ok=True)
        mount("--rbind", held[path], path)


def highest_closed(path: str) -> str | None:
    """The first folder on the way to it that others may not enter."""
    way = path.split("/")[1:-1]
    for depth in range(1, len(way) + 1):
        folder = "/" + "/".join(way[:depth])
        if not os.stat(folder).st_mode & stat.S_IXOTH:
            return folder
    return None


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
