"""What the guards of other people's loops share (Lightning's, Hugging Face's): one fit under a guard.

Their loops are not ours to restart in the middle. So a resumed fit begins as any other, and at the first safe point,
the same place in their code at which the checkpoint was made, everything that was saved replaces what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.encoding import encode
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.saver import Receipt
from buoy.errors import BuoyError, UsageError
from buoy.flight.profile import Profiling
from buoy.microbatch.batch import Batch, Split
from buoy.microbatch.errors import StepError
from buoy.training import recording
from buoy.training.loop import MicroBatches
from buoy.training.manager import CheckpointManager
from buoy.training.messages import say
from buoy.training.options import Options, folder_name
from buoy.training.ranks import Saves
from buoy.training.resume import Resumption
from buoy.training.save_policy import ENDING

if TYPE_CHECKING:
    from buoy.planner.result import Plan
    from buoy.torch.data.loader import ResumableLoader
    from buoy.torch.state.state_dict import Tracked

_OWN_PROFILERS = {
    "lightning": '`Trainer(profiler="simple")` is Lightning\'s own',
    "transformers": "`torch.profiler.profile()` around `train()` is PyTorch's own",
}


class TrainerGuard:
    """What every guard of a trainer is given, and what its user can ask of it."""

    library: str

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mirror: str | None = None,
        time_limit: str | float | None = None,
        disk: str | None = None,
        save: str | int | None = None,
        keep: Keep | int | None = None,
        seed: int | None = None,
        micro_batch: int | None = None,
        inexact: tuple[str, ...] = (),
        memory_cap: str | int | None = None,
        remedies: tuple[str, ...] | str = (),
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        self.options = Options(
            mirror=mirror, time_limit=time_limit, disk=disk, save=save, keep=keep, seed=seed,
            micro_batch=micro_batch, inexact=inexact, memory_cap=memory_cap, remedies=remedies, plan=plan,
        )  # fmt: skip
        self.folder = folder_name(folder)
        self.guarding: Guarding | None = None
        """The fit that is under way."""

    def __repr__(self) -> str:
        return f"<buoy.{self.library}.Guard {self.folder}>"

    def _repr_html_(self) -> str:
        from buoy.view.cards import guard_card

        return guard_card(repr(self), self.folder)

    @property
    def resumed(self) -> bool:
        """Whether the fit that is under way resumes from a checkpoint."""
        return self.guarding is not None and self.guarding.resumed

    def save(self, *, pin: str | None = None) -> None:
        """A checkpoint at the next safe point, before the next batch. A pinned one is never deleted."""
        if self.guarding is not None:
            self.guarding.wish(pin)


class Guarding:
    """Keeps the checkpoints of one fit, and brings the newest back."""

    def __init__(self, guard: TrainerGuard, transaction: Callable[..., Any]) -> None:
        """`transaction` makes the one for the training's steps, of the options and who to report to."""
        from buoy.torch.data import rng
        from buoy.torch.state.forgotten import Forgotten

        options = guard.options
        self._rng, self._library = rng, guard.library
        self.keeper = CheckpointManager(guard.folder, options)
        self.stack = ExitStack()
        """What is undone when the fit is over, the last first."""
        self.stack.callback(self.keeper.finish)
        try:
            self._saves = Saves(self.keeper, options.keep, say)
            self._from = Resumption(self.keeper, say)
            self.place: dict[str, Any] = dict(self._from.mine)
            """What was saved of the loop's place; empty when nothing is resumed."""
            self._refuse_another_library()
            settings = {"say": say, "event": self.keeper.recorder.event, **options.steps}
            self.micro = MicroBatches(self.keeper.folder, self._from.micro_batch, settings, make=transaction)
        except BaseException:
            self.stack.close()
            raise
        self.seed: int | None = self.place.get("seed", options.seed)
        self.saved_step = self._from.step
        recording.record_plan(options.plan, self.keeper.recorder.event)
        self.stack.callback(recording.compare, options.plan, self.keeper.recorder.event, say)
        self._things: dict[str, Tracked] = {}
        self._forgotten = Forgotten(say)
        self._arrived = not self.place
        _take_back_profile(guard.library)

    @property
    def resumed(self) -> bool:
        """Whether this fit resumes from a checkpoint."""
        return bool(self.place)

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Put this in the place of a method until the fit is over; its first argument is what was there."""
        setattr(owner, name, partial(replacement, getattr(owner, name, None)))
        self.stack.callback(vars(owner).pop, name, None)

    def loader(self, loader: Any) -> ResumableLoader:
        """The user's loader, from the saved place on."""
        from buoy.torch.data.loader import ResumableLoader

        saved = self.place.get("data") if not self._arrived and not self.place.get("finished") else None
        made = ResumableLoader(
            loader, say, seed=self.seed, saved=saved, is_stopping=lambda: self.keeper.is_stopping
        )
        self.seed = made.seed
        return made

    def begin(self, things: dict[str, Tracked], *trained: object) -> None:
        """Everything is built: refuse what cannot be saved, and load what was."""
        from buoy.torch.state.tensors import as_tensor

        self._things = things
        for name, thing in things.items():
            encode(name, thing.state(), as_tensor)
        self._from.load(things)
        self._from.name_what_is_left(things)
        self.micro.track(*trained)
        items = {name: getattr(thing, "expected", thing.state)() for name, thing in things.items()}
        self.keeper.expect(items, as_tensor)
        if self.resumed:
            self.keeper.recorder.step(self.saved_step)

    def arrive(self, loader: ResumableLoader) -> bool:
        """At every safe point, first of all; whether everything was loaded once more, which is so at the first."""
        if self._arrived:
            return False
        self._arrived = True
        self._from.load(self._things)
        self._rng.restore(self.place["rng"], say)
        self._from.forget()
        loader.arrived()
        return True

    def safe_point(self, step: int, epoch: int, place: Callable[[], dict[str, Any]]) -> bool:
        """Save if anybody wants that; whether a signal wanted the process to end after it."""
        reason, pin = self._saves.due(step)
        if not reason:
            return False
        self._save(step, epoch, place(), reason=reason, pin=pin)
        return reason in ENDING

    def stepped(self) -> None:
        """The weights are about to change: what was measured was measured on others."""
        self._saves.weights_change()

    def measured(self, values: Mapping[str, Any]) -> None:
        """Figures of the weights as they are now."""
        plain = {}
        for name, value in values.items():
            try:
                plain[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                continue
        self._saves.measured(plain)

    def wish(self, pin: str | None) -> None:
        """A user asks for a checkpoint: it is made at the next safe point."""
        self._saves.wish("user", pin)

    def finished(self, step: int, epoch: int, **place: Any) -> Receipt | None:
        """The training is done: the last checkpoint; unless it never came to its saved place, which then stays."""
        if not self._arrived and not self.place["finished"]:
            return None
        return self._save(step, epoch, {"data": None, **place}, reason="finished", finished=True)

    def _save(
        self, step: int, epoch: int, place: dict[str, Any], *, finished: bool = False, **about: Any
    ) -> Receipt | None:
        from buoy.torch.state.forgotten import state_beside

        self._forgotten.look_at_growth(self._things)
        mine = {
            "library": self._library,
            "rng": self._rng.capture(),
            "seed": self.seed,
            "finished": finished,
            **state_beside(self._things),
            "micro_batch": self.micro.state(),
            **place,
        }
        return self._saves.save(
            self._things, mine, step=step, epoch=epoch, finished=finished, finite=self.micro.is_finite(),
            **{"pin": None, **about},
        )  # fmt: skip

    def _refuse_another_library(self) -> None:
        theirs = self.place.get("library", "buoy.Run")
        if self.place and theirs != self._library:
            raise BuoyError(
                "the newest checkpoint belongs to another kind of training",
                received=f"{self.keeper.folder}: made under {theirs}",
                expected=f"one that was made under {self._library}",
                hint="use a folder of its own for each training",
            )


def refuse_many_processes(processes: int, library: str) -> None:
    """A rank of theirs that fails leaves the others waiting in a collective of theirs."""
    if processes > 1:
        raise UsageError(
            f"buoy.{library}.Guard guards one process",
            received=f"{processes} processes",
            expected="one process; it may use several GPUs through DataParallel",
            hint="start it with one device, or use `buoy.Run` under torchrun with DistributedDataParallel",
        )


def _take_back_profile(library: str) -> None:
    """`%buoy profile` means this training, which has no profile: the wish must not wait for another one."""
    if not Profiling.of_next_training:
        return
    Profiling.of_next_training = 0
    own = _OWN_PROFILERS[library]
    known = "`buoy.Run`, `buoy.keras.Guard` and `buoy.keras.Loop`"
    say(f"this training is not profiled: `%buoy profile` knows {known} only; {own}")


def samples_of(batch: object) -> int:
    """How many samples it has; 1 when it cannot be split.

    >>> import torch
    >>> samples_of({"boxes": torch.zeros(5, 4), "image": torch.zeros(3, 8, 8)})
    1
    """
    try:
        return Batch(batch).samples
    except StepError:
        return 1


def split_of(batch: object) -> Split | None:
    """How to split it; None: along the first dimension of its arrays."""
    try:
        Batch(batch)
    except StepError:
        return 1, lambda start, stop: batch
    return None


def hint_in_a_trainer(hint: str, fewer: str) -> str:
    """What can be done there, where a hint is about arguments of `run.backward`; `fewer`: how to ask for less at once.

    >>> hint_in_a_trainer('reduction="sum"', "a smaller batch")
    'a smaller batch; in a loop of your own, `run.backward` of buoy.Run takes a loss as (sum, how many), and `split=`'
    """
    if not any(word in hint for word in ("split=", "reduction=", "(sum", "run.backward")):
        return hint
    return f"{fewer}; in a loop of your own, `run.backward` of buoy.Run takes a loss as (sum, how many), and `split=`"
