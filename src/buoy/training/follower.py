"""What the ranks that do not write have in place of a keeper: they read the checkpoint, and hear signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from buoy.checkpoint.state import AsTensor
from buoy.checkpoint.store import Checkpoint, Receipt, Store
from buoy.flight import recorder
from buoy.training.signals import Signals


class Follower:
    """Rank 1 and above. Same words as `Keeper`; `save` saves nothing."""

    def __init__(self, folder: str) -> None:
        self.recorder = recorder.current() or recorder.join(recorder.attempt_of_environment())
        self._store = Store(folder)
        self._signals = Signals(self.recorder, _say_nothing)

    def newest(self) -> Checkpoint | None:
        """The checkpoint that rank 0 has found."""
        return self._store.newest(_say_nothing)

    def expect(self, items: Mapping[str, object], as_tensor: AsTensor) -> None:
        """Nothing is written here."""

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the iteration over batches: signals wait for the safe point that all ranks share."""
        self._signals.arm()
        try:
            yield
        finally:
            self._signals.disarm()

    def epoch_begins(self, epoch: int, of: int | None, step: int, *, is_whole: bool = True) -> None:
        """Rank 0 tells how long the training will be."""
        self.recorder.epoch(epoch)

    @property
    def is_stopping(self) -> bool:
        """A signal has asked this process to end."""
        return self._signals.asked is not None

    def due(self, step: int) -> str | None:
        """Only a signal can make a rank that does not write ask for a save."""
        return self._signals.asked

    def save(self, items: Mapping[str, object], *, step: int, **about: object) -> Receipt:
        """Rank 0 writes."""
        return Receipt(step, "", 0, 0.0, 0.0)

    def stop_if_asked(self) -> None:
        """After the save that a signal asked for: end as that signal would have ended it."""
        self._signals.answer()

    def finish(self) -> None:
        """Restore the signal handlers."""
        self._signals.let_go()


def _say_nothing(text: str) -> None:
    """Rank 0 speaks for all."""
