"""What the guards of other people's loops share (Lightning's, Hugging Face's): one fit under a guard.

Their loops are not ours to restart in the middle. So a resumed fit begins as any other, and at the first safe point,
the same place in their code at which the checkpoint was made, everything that was saved replaces what is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.encoding import encode
from buoy.checkpoint.saver import Receipt
from buoy.errors import BuoyError, UsageError
from buoy.flight.profile import Profiling
from buoy.training.loop import MicroBatches
from buoy.training.manager import CheckpointManager
from buoy.training.messages import say
from buoy.training.options import Options
from buoy.training.ranks import Saves
from buoy.training.resume import Resumption
from buoy.training.save_policy import ENDING

if TYPE_CHECKING:
    from buoy.torch.data.loader import ResumableLoader
    from buoy.torch.state.state_dict import Tracked

_OWN_PROFILERS = {
    "lightning": '`Trainer(profiler="simple")` is Lightning\'s own',
    "transformers": "`torch.profiler.profile()` around `train()` is PyTorch's own",
}


class Guarding:
    """Keeps the checkpoints of one fit, and brings the newest back."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        library: str,
        options: Options,
        transaction: Callable[..., Any],
    ) -> None:
        """`transaction` makes the one for the training's steps, of the options and who to tell."""
        from buoy.torch.data import rng
        from buoy.torch.state.forgotten import Forgotten

        self._rng, self._library = rng, library
        self.keeper = CheckpointManager(os.fspath(folder), options)
        try:
            self._saves = Saves(self.keeper, options.keep, say)
            self._from = Resumption(self.keeper, say)
            self.place: dict[str, Any] = dict(self._from.mine)
            """What was saved of the loop's place; empty when nothing is resumed."""
            self._refuse_another_library()
        except BaseException:
            self.keeper.finish()
            raise
        self.seed: int | None = self.place.get("seed", options.seed)
        self.saved_step = self._from.step
        settings = {"say": say, "event": self.keeper.recorder.event, **options.steps}
        try:
            self.micro = MicroBatches(self.keeper.folder, self._from.micro_batch, settings, make=transaction)
        except BaseException:
            self.keeper.finish()
            raise
        self._things: dict[str, Tracked] = {}
        self._forgotten = Forgotten(say)
        self._arrived = not self.place
        _take_back_profile(library)

    @property
    def resumed(self) -> bool:
        """Whether this fit goes on from a checkpoint."""
        return bool(self.place)

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
        """A person asks for a checkpoint: it is made at the next safe point."""
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
                "the newest checkpoint is of another kind of training",
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
