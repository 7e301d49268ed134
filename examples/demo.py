"""`make demo`: a training dies in a session made small for real, and buoy says why.

0. `buoy check` reads a common training script and points at the line that will kill it. Nobody listens.
1. The script is run under `buoy run` in a memory cgroup of 400 MiB (the way Colab and Kaggle confine
   a session). It leaks, and the kernel kills it without a word.
2. `buoy why` says what killed it, how sure it is, and what to do.
3. The same script with the leak mended finishes in the same small session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BUOY = [sys.executable, "-m", "buoy"]
SCRIPT = str(Path(__file__).with_name("leaky_training.py"))
LIMIT_MIB = 400


def main() -> int:
    group = small_session()
    with tempfile.TemporaryDirectory(prefix="buoy-demo-") as folder:
        run = str(Path(folder) / "leaky")
        say("0. Before it runs: `buoy check leaky_training.py`")
        subprocess.run([*BUOY, "check", SCRIPT], check=False)
        say("")
        say(
            f"1. A training that leaks, in a session of {LIMIT_MIB} MiB: `buoy run -- python leaky_training.py`"
        )
        died = confined(group, [*BUOY, "run", "--run", run, "--", sys.executable, SCRIPT])
        say(f"   it ended with exit code {died}\n\n2. What was that? `buoy why`")
        subprocess.run([*BUOY, "why", run], check=False)
        say("\n3. The same training with that line mended, in the same small session")
        mended = [*BUOY, "run", "--run", f"{folder}/mended", "--", sys.executable, SCRIPT, "--mended"]
        finished = confined(group, mended)
    if group is not None:
        group.rmdir()
    say(f"   it ended with exit code {finished}")
    return 0 if died != 0 and finished == 0 else 1


def say(text: str) -> None:
    print(text, flush=True)


def small_session() -> Path | None:
    """A memory cgroup (v1 or v2) of our own, or None where this machine allows none."""
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(parent) / f"buoy-demo-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_MIB << 20))
            return group
        except OSError:
            group.rmdir()
    say("This machine lets us make no memory cgroup: a limit on the process's own memory stands in for it,\n"
        "so the training ends with a MemoryError instead of the kernel's kill.\n")  # fmt: skip
    return None


def confined(group: Path | None, command: list[str]) -> int:
    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_MIB << 20, LIMIT_MIB << 20))

    return subprocess.run(command, preexec_fn=enter, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
