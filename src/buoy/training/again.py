"""What trains on after its end, a loop (a notebook's cell run again) or an epoch: a line says what that does."""

from __future__ import annotations

from collections.abc import Callable

from buoy.machine import cell


class Again:
    """Which cell a Run's epochs ended in, and the lines to the person who begins anew."""

    def __init__(self, say: Callable[[str], None], folder: str | None) -> None:
        self._say, self._folder = say, folder
        self._cell: int | None = None
        self._is_told = self._told_epoch = self._told_draws = False

    def epochs_ended(self) -> None:
        """All epochs that were asked for are done."""
        self._cell = cell.running()

    def epochs_begin(self, asked: int, left: int, step: int) -> None:
        """`left` of the epochs asked for are to be trained. In the same cell, or in a script, it is a second phase."""
        if self._cell is None or self._cell == cell.running() or not left:
            return
        hint = f". To train only what is missing of {asked}, first run the cell that makes the Run"
        self._say(
            f"the epochs of this Run had ended, at step {step}; training {left} more"
            + (hint if self._folder is not None else "")
        )

    def used_after_finish(self, step: int) -> None:
        """A loop begins on a Run that has let go of its folder."""
        if self._folder is not None and not self._is_told:
            self._is_told = True
            self._say(
                f"this Run was finished, at step {step}: it saves nothing any more. To train on, make the Run again"
            )

    def epoch_trains_on(self, epoch: int, saved: int | None) -> None:
        """A step in an epoch (from 0) of which a checkpoint says that it is done."""
        if self._folder is not None and not self._told_epoch:
            self._told_epoch = True
            self._say(
                f"epoch {epoch + 1} trains on after `run.save()` at step {saved}, which was taken for its end: a "
                "training that goes on from that checkpoint leaves the rest of this epoch out; hint: save inside "
                "`for batch in run.batches(loader):`, or after the epoch's last step"
            )

    def draws_go_on(self) -> None:
        """A loop that only its tracked values know the place of goes on: random states are those of its checkpoint."""
        if not self._told_draws:
            self._told_draws = True
            self._say(
                "random numbers go on from `run.track` as they were saved, which is right for a loop of its own: "
                "what is drawn between `run.track` and the loop (a split of the data) is another one than at first; "
                "hint: draw it before `run.track`"
            )
