"""Where a training is between its first epoch and its last, and when it may be saved there.

A run's place is (epoch, loop, samples): loops over batches are counted within an epoch, in the order in which the
script begins them. A script that is started again comes by the same way: loops that were done yield nothing, the
one that was under way resumes at its sample.

A safe point is where nothing of a step is under way: a loop asks for its next batch, an optimizer has stepped since
the last one was handed out, and the loop is not inside the body of another.

What `run.batches(loader)` returns: the loader's batches, with a safe point before each.

What trains on after its end, a loop (a notebook's cell run again) or an epoch: a line says what that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from buoy.flight.last_words import leave_out_ours
from buoy.machine import process


class Way(Enum):
    """Where a script that comes by the same way once more is, seen from the place that was saved."""

    BEFORE = "before"
    THERE = "there"
    PAST = "past"


def is_in_a_loop_of_its_own(place: Mapping[str, Any]) -> bool:
    """Saved in a training that has stepped without any loop over `batches`: there is no way back to find.

    Its script knows by what is tracked (`while state["step"] < 1000:`) where it is, as soon as that is loaded.

    >>> is_in_a_loop_of_its_own({"epoch_done": False, "next_loop": 0, "stepped": True})
    True
    """
    return bool(place.get("stepped")) and not place["next_loop"] and not place["epoch_done"]


@dataclass(eq=False)
class Loop:
    """One iteration over batches."""

    number: int
    """Its place among the loops of the epoch."""
    root: int
    """The first loop of this epoch over the same loader."""
    owner: int
    """Which loader: the same one again is the same work."""
    nested: bool
    """Begun inside the body of another loop, so that its own safe points are none."""
    saved: dict[str, Any] | None
    """Where to go on, when this loop was under way in the checkpoint."""
    done: bool
    """It was done before the checkpoint: it yields nothing."""
    in_body: bool = False
    trains: bool = False
    begun: bool = False
    """A batch was handed out in this process."""
    place: Callable[[], dict[str, Any]] | None = None
    """Its state for the next checkpoint; None before its first batch is asked for."""
    settled_before: bool = True


class Position:
    """The place of a run, kept while it goes and found again when it resumes."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.epoch = int(saved["epoch"]) if saved else 0
        self.counts_steps = False
        """An optimizer is tracked: safe points wait for its steps."""
        self._saved = saved if saved and not saved["epoch_done"] else None
        self.first_epoch = self.epoch + 1 if saved and saved["epoch_done"] else self.epoch
        self._waiting: dict[str, Any] = dict(self._saved["open"]) if self._saved else {}
        """The loops that were under way in the checkpoint and have not begun again yet."""
        self.repeats = bool(self._waiting)
        """What the script does on the way to the saved place was done before the save: it is to be undone there."""
        self._after_waiting = int(self._saved["next_loop"]) if self._saved else 0
        self._next_loop = self._saves = 0
        self._outer: list[int] = []
        """The loops of this epoch that were begun outside of any body: coming by again a script begins just these."""
        self._stepped = False
        self.is_called_done = False
        """A `save` in this epoch was taken for its end."""
        self._roots: dict[int, int] = {}
        self._open: dict[int, Loop] = {}
        self._left: dict[int, Loop] = {}
        """Loops that the script has just left before their end; forgotten once it goes on to another."""
        self._settled = True
        self._training: set[int] = set()

    def reopen_what_was_left(self) -> bool:
        """A loop that the script has just left before its end counts as under way again; whether there is one."""
        self._open = {**self._left, **self._open}
        left, self._left = bool(self._left), {}
        return left

    def again(self) -> Position:
        """The same place for a script that comes by the same way once more, in this process."""
        self.reopen_what_was_left()
        anew = Position(self.describe())
        anew.counts_steps, anew._training = self.counts_steps, self._training
        return anew

    @property
    def has_begun(self) -> bool:
        """A loop over batches was begun, or come by again."""
        return self._next_loop > 0

    @property
    def is_returning(self) -> bool:
        """The saved place has not been reached yet."""
        return self._saved is not None

    @property
    def is_known_to_what_is_tracked(self) -> bool:
        """The saved place has not been reached yet, and nobody but the script can tell when it is."""
        return self._saved is not None and is_in_a_loop_of_its_own(self._saved)

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins; loops that were left open belong to the last one."""
        self.epoch = epoch
        self._next_loop = self._saves = 0
        self._stepped = self.is_called_done = False
        self._open.clear()
        self._left.clear()
        self._roots.clear()
        self._outer.clear()
        if self._saved is not None and epoch != self._saved["epoch"]:
            self._saved = None
            self._waiting.clear()

    def begin_loop(self, owner: int) -> Loop:
        """The script begins to iterate over batches."""
        self._left.clear()
        self._saves = 0
        number, saved = self._claim(self._next_loop)
        nested = any(loop.in_body for loop in self._open.values())
        done = saved is None and self._saved is not None and number < self._saved["next_loop"]
        self.repeats = self.repeats or done
        root = self._roots.setdefault(owner, number)
        loop = Loop(number, root, owner, nested, saved or None, done, trains=owner in self._training)
        if not nested:
            self._outer.append(number)
        if not done:
            self._open[number] = loop
        elif not nested:
            self._next_loop = self._after(number)
        return loop

    def _after(self, done: int) -> int:
        """The number after a loop that yields nothing: those that were begun in its bodies are not begun again."""
        assert self._saved is not None
        outer = self._saved.get("outer")
        if outer is None:  # an older checkpoint
            return self._next_loop
        return min([number for number in outer if number > done], default=int(self._saved["next_loop"]))

    def _claim(self, number: int) -> tuple[int, dict[str, Any] | None]:
        """The number of a loop that begins, and where it was in the checkpoint."""
        self._next_loop += 1
        mine = str(number) if str(number) in self._waiting else None
        if mine is None:
            # `batches = iter(run.batches(loader))`, started again inside another loop's body each time it is exhausted:
            # the first beginning of the resumed script stands for the latest one.
            again = [
                key for key, state in self._waiting.items() if state["nested"] and state["root"] == number
            ]
            mine = again[0] if again else None
        if mine is None:
            return number, None
        saved = self._waiting.pop(mine)
        if not self._waiting:
            self._next_loop = max(self._next_loop, self._after_waiting)
        return int(mine), saved["at"] or {}

    @property
    def was_missed(self) -> bool:
        """A loop was under way in the checkpoint, others were come by, and it was not among them."""
        return self._saved is not None and bool(self._waiting) and bool(self._outer)

    def arrive(self) -> bool:
        """The first loop with work to do begins; whether this is the saved place, found again."""
        arrived = self._saved is not None
        self._saved = None
        return arrived

    def come_by_save(self) -> Way | None:
        """The script calls `save`: where that is, seen from the saved place; None when it is not on its way there."""
        if not self._open:
            self._saves += 1  # those in a loop's body are not made again on the way
        saved = self._saved
        # One who trains without `batches` shows it by a step; without either nobody can tell where the script is.
        if saved is None or self._stepped or not (saved["next_loop"] or self.counts_steps):
            return None
        here, there = (self._next_loop, self._saves), (saved["next_loop"], saved.get("saves", 0))
        if saved["open"] or here < there:
            return Way.BEFORE
        return Way.THERE if here == there else Way.PAST

    @property
    def is_before_the_first_step(self) -> bool:
        """Nothing of this epoch has been trained, as far as optimizers tell."""
        return self.counts_steps and not self._next_loop and not self._stepped

    def end_loop(self, loop: Loop, *, exhausted: bool = True) -> None:
        """It is exhausted, or the script has left it."""
        if self._open.get(loop.number) is loop:
            del self._open[loop.number]
            self._leave_body(loop)
            if not exhausted:
                self._left[loop.number] = loop

    def hand_out(self, loop: Loop) -> None:
        """A batch goes to the script."""
        loop.settled_before = self._settled
        loop.in_body = loop.begun = True
        self._settled = not self.counts_steps

    def stepped(self) -> None:
        """An optimizer has stepped: what was handed out has been used."""
        self._settled = self._stepped = True
        for loop in self._open.values():
            if loop.in_body and not loop.trains:
                loop.trains = True
                self._training.add(loop.owner)

    def asked(self, loop: Loop) -> bool:
        """The loop asks for its next batch: its last body is done. Whether this is a safe point."""
        self._leave_body(loop)
        if loop.nested or not self._settled:
            return False
        if not self.counts_steps:
            return loop.number == min(self._open)
        # A loop that does not train is an evaluation: what it has summed up so far is not ours to save.
        return loop.trains or not loop.begun

    @property
    def is_settled(self) -> bool:
        """No step is under way: between loops, this is a safe point."""
        return self._settled and not any(loop.in_body for loop in self._open.values())

    @property
    def is_between_steps(self) -> bool:
        """No gradient waits to be used; a body may still be under way."""
        return self._settled

    def describe(self, *, epoch_done: bool = False) -> dict[str, Any]:
        """The place, in plain values."""
        return {
            "epoch": self.epoch,
            "epoch_done": epoch_done,
            "next_loop": self._next_loop,
            "saves": self._saves,
            "stepped": self._stepped,
            "outer": list(self._outer),
            "open": {
                str(loop.number): {
                    "root": loop.root,
                    "nested": loop.nested,
                    "at": loop.place() if loop.place is not None else None,
                }
                for loop in self._open.values()
            },
        }

    @property
    def has_open_loops(self) -> bool:
        """Some iteration over batches is under way."""
        return bool(self._open)

    @property
    def under_way(self) -> set[int]:
        """The loaders whose places are in `describe`."""
        return {loop.owner for loop in self._open.values() if loop.place is not None}

    def _leave_body(self, loop: Loop) -> None:
        if loop.in_body and not loop.trains and not self._settled and self._training:
            self._settled = loop.settled_before  # it only reads: an evaluation between two epochs
        loop.in_body = False


class Batches:
    """Iterates over a loader from where the run is. Each `iter()` is a new pass.

    >>> batches = Batches([1, 2], iter)
    >>> len(batches), next(batches), list(batches)
    (2, 1, [1, 2])
    """

    def __init__(self, loader: Iterable[Any], walk: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        """The user's own loader."""
        self._walk = walk
        self._current: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self.loader)

    def __next__(self) -> Any:
        if self._current is None:
            self._current = iter(self)
        try:
            return next(self._current)
        except BaseException as error:
            leave_out_ours(error)
            raise


class Again:
    """Which cell a Run's epochs ended in, and the lines to the user who trains again."""

    def __init__(self, say: Callable[[str], None], folder: str | None) -> None:
        self._say, self._folder = say, folder
        self._cell: int | None = None
        self._is_said = self._said_epoch = self._said_draws = False

    def epochs_ended(self) -> None:
        """All epochs that were asked for are done."""
        self._cell = process.running()

    def epochs_begin(self, asked: int, left: int, step: int) -> None:
        """`left` of the epochs asked for are to be trained. In the same cell, or in a script, it is a second phase."""
        if self._cell is None or self._cell == process.running() or not left:
            return
        hint = f". To train only what is missing of {asked}, first run the cell that makes the Run"
        self._say(
            f"the epochs of this Run had ended, at step {step}; training {left} more"
            + (hint if self._folder is not None else "")
        )

    def used_after_finish(self, step: int) -> None:
        """A loop begins on a Run that has let go of its folder."""
        if self._folder is not None and not self._is_said:
            self._is_said = True
            self._say(
                f"this Run is finished, at step {step}: it saves nothing more. To continue training, "
                "create the Run again"
            )

    def epoch_trains_on(self, epoch: int, saved: int | None) -> None:
        """A step in an epoch (from 0) of which a checkpoint says that it is done."""
        if self._folder is not None and not self._said_epoch:
            self._said_epoch = True
            self._say(
                f"epoch {epoch + 1} continues after `run.save()` at step {saved}, which buoy took for its end: a "
                "training that resumes from that checkpoint skips the rest of this epoch; hint: save inside "
                "`for batch in run.batches(loader):`, or after the epoch's last step"
            )

    def draws_go_on(self) -> None:
        """A loop whose place only its tracked values know resumes: random states are those of its checkpoint."""
        if not self._said_draws:
            self._said_draws = True
            self._say(
                "the RNG continues from `run.track` as it was saved, which is right for a loop of your own: "
                "what is drawn between `run.track` and the loop (such as a data split) differs from the first start; "
                "hint: draw it before `run.track`"
            )
