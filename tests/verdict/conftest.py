"""An attempt folder to fill for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from folders import Attempt


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """A training of ten minutes that somebody killed with SIGKILL, unless the test changes it."""
    return Attempt(tmp_path)
