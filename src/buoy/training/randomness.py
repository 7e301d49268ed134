"""A run's seed and its random state, at the place it was saved and on the script's way there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buoy.training.resumption import Resumption


class Randomness:
    """What a run draws from. A resumed script draws on its way to the loop what it drew the first time."""

    def __init__(self, saved: Resumption, seed: int | None, say: Callable[[str], None]) -> None:
        from buoy.torch import rng

        self._rng, self._saved, self._say = rng, saved, say
        self._seed: int | None = saved.mine.get("seed", seed)
        if seed not in (None, self._seed):
            say(f"seed={seed} is not used: this run was begun with {self._seed}")
        self._before_loop: Any = saved.mine.get("before_loop") or rng.capture()
        """Where the way to the loop began."""

    @property
    def seed(self) -> int:
        """Decides the order of the data and what is drawn for it; torch's own where none was given."""
        if self._seed is None:
            self._seed = self._rng.initial_seed()
        return self._seed

    def begin_way(self) -> None:
        """The script sets out for its next loop."""
        self._before_loop = self._rng.capture()

    def return_to_way(self) -> None:
        """As it was saved where the script set out for the loop; does nothing once the run is past its checkpoint."""
        self._restore("before_loop")

    def return_to_place(self) -> None:
        """As it was saved in the loop; does nothing once the run is past its checkpoint."""
        self._restore("rng")

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rng": self._rng.capture(), "before_loop": self._before_loop, "seed": self._seed}

    def _restore(self, which: str) -> None:
        if self._saved:
            with self._saved.reading("the state of the random numbers"):
                self._rng.restore(self._saved.mine[which], self._say)
