"""One TensorFlow start for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.keras.trial import Live, nursery


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with nursery() as ask:
        yield ask
