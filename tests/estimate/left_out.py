"""What tests of modules that a trace leaves out share: a process of their own, since a module is loaded only once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def told_by(program: str, build: str, tmp_path: Path) -> list[Any]:
    """What the program prints in its last line, as JSON; it gets the path of a file with this build function."""
    (tmp_path / "model.py").write_text(build)
    command = [sys.executable, "-c", program, str(tmp_path / "model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
