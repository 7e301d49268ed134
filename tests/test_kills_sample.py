"""A few seconds of the campaign that `make kills` runs in full: no death during a save costs more than that save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kills.kind import Kind
from tests.kills.kinds import ALL


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_nothing_promised_is_lost(kind: Kind, tmp_path: Path) -> None:
    tally = kind.run(6, random.Random(kind.name), tmp_path)

    assert tally.good, tally.failures[:5]
    if tally.skipped:
        pytest.skip(tally.skipped)
    assert tally.tried
