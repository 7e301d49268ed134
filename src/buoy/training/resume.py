"""The checkpoint a run resumes from: found by all ranks alike, checked, and loaded into what is tracked.

The runs of this process by folder: a cell that is run again takes its folder over, and each is finished at exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from buoy.errors import BuoyError
from buoy.text import printable

if TYPE_CHECKING:
    from buoy.checkpoint.store import Checkpoint
    from buoy.torch.state.state_dict import Tracked
    from buoy.training.loop import TrainingLoop
    from buoy.training.manager import CheckpointManager
    from buoy.training.ranks import Follower

OURS = "buoy"
"""The name in a checkpoint under which a run keeps its own state."""


class Resumption:
    """What was saved of a run, as one rank sees it; empty where nothing was saved."""

    def __init__(self, manager: CheckpointManager | Follower | None, say: Callable[[str], None]) -> None:
        from buoy.torch.step.ranks import world

        self._say = say
        self.is_kept = manager is not None
        """Whether anything is saved at all."""
        self._rank, self._world = world()
        self._checkpoint = self._find(manager)
        self._announced = False
        self._said_new: set[str] = set()
        """Of these it was said already that they start over, or that they differ from what the script says."""
        self._gone: set[str] = set()
        """What the checkpoint had, once it is let go."""
        self.step = self._checkpoint.step if self._checkpoint is not None else 0
        with self.reading("what the run kept of itself"):
            whole = self._own_state()
            self.mine: dict[str, Any] = whole["ranks"][self._rank] if whole else {}
            """This rank's place and random state."""
            self.micro_batch: dict[str, Any] | None = self.mine.get("micro_batch")

    def __bool__(self) -> bool:
        return bool(self.mine)

    def reading(self, what: str) -> AbstractContextManager[None]:
        """For code that uses what was saved: somebody may have written something else there."""
        return self._checkpoint.reading(what) if self._checkpoint is not None else nullcontext()

    @property
    def finished(self) -> bool:
        """The training had come to its end there."""
        return self._checkpoint is not None and self._checkpoint.about.get("finished") is True

    def announce(self) -> None:
        """Say where the run resumes, if it does; once, when what was saved is known to fit."""
        checkpoint = self._checkpoint
        if checkpoint is None or self._announced:
            return
        self._announced = True
        if self.finished:
            folder = os.path.dirname(os.path.dirname(checkpoint.folder))
            near = os.path.relpath(folder)
            name = folder if near.startswith("..") else near
            self._say(
                f"{name} is finished at step {self.step}: nothing is trained again. Ask for more epochs "
                "to train further; a new training needs a folder of its own"
            )
            return
        epoch = checkpoint.about.get("epoch")  # from 0; in messages it counts from 1, as Keras does
        self._say(
            f"resumed from step {self.step}" + (f" (epoch {epoch + 1})" if isinstance(epoch, int) else "")
        )

    def say_missed(self) -> None:
        """The script has ended, and its loops were not those of the checkpoint."""
        self._say(
            f"NOTHING WAS TRAINED: the script did not get back to its position at step {self.step}. It ran other loops "
            "over batches than the one that was saved; hint: `for epoch in run.epochs(n):` keeps them apart"
        )

    def load(self, things: dict[str, Tracked]) -> None:
        """Load each from the checkpoint, or none if any does not fit."""
        if self._checkpoint is not None:
            with self.reading(f"what was saved of {', '.join(things)}"):
                self._load(self._checkpoint, things)

    def _load(self, checkpoint: Checkpoint, things: dict[str, Tracked]) -> None:
        from buoy.torch.state.forgotten import expect, load_beside
        from buoy.torch.state.state_dict import changed_settings, load_all, settings_of

        there = {name: thing for name, thing in things.items() if name in checkpoint.names}
        expect(there, self.mine)
        load_all({name: checkpoint.value(name, thing.tensor) for name, thing in there.items()}, there)
        load_beside(there, self.mine, self._say)
        for name, settings in settings_of(there).items():
            changed = changed_settings(self.mine.get("settings", {}).get(name, []), settings)
            if changed and name not in self._said_new:
                self._said_new.add(name)
                self._say(
                    f"{name} keeps its saved settings; the script now says {', '.join(changed)}. To change "
                    f"it, set it after `run.track`: `for group in {name}.param_groups: group['lr'] = ...`"
                )
        for name in things:
            if name not in checkpoint.names and name not in self._said_new:
                self._said_new.add(name)
                self._say(
                    f"{name} is missing from the checkpoint of step {self.step}: it starts as the script built it"
                )

    def name_what_is_left(self, tracked: Iterable[str]) -> None:
        """Say which saved names nobody tracks any more."""
        names = self._checkpoint.names if self._checkpoint is not None else []
        left = sorted(set(names) - {OURS, *tracked})
        if left:
            self._say(f"in the checkpoint, but not tracked now, so not saved again: {', '.join(left)}")

    def name_what_is_late(self, names: Iterable[str]) -> None:
        """Say what was saved and is tracked only now, past the place where it could be loaded."""
        late = sorted(self._gone & set(names))
        if late:
            self._say(f"tracked after the first batch, so not loaded: {', '.join(late)}")

    def forget(self) -> None:
        """The run is past the checkpoint: let go of its memory."""
        if self._checkpoint is not None:
            self._gone = set(self._checkpoint.names)
        self._checkpoint = None
        self.mine = {}

    def _find(self, manager: CheckpointManager | Follower | None) -> Checkpoint | None:
        from buoy.torch.step.ranks import agree

        if manager is None:
            return None
        found = manager.newest() if self._rank == 0 else None
        step = agree(found.step if found is not None else -1)
        if self._rank and step >= 0:
            found = manager.newest()
        mine = found.step if found is not None else -1
        if agree(int(step != mine)):
            raise BuoyError(
                "the ranks do not see the same checkpoint",
                received=f"rank 0: step {step}; rank {self._rank}: {mine if mine >= 0 else 'none'}",
                expected="one run folder that all ranks can read",
                hint="put the run folder on a shared file system",
            )
        return found

    def _own_state(self) -> Any:
        checkpoint = self._checkpoint
        if checkpoint is None:
            return None
        from buoy.torch.state.tensors import kept

        if OURS not in checkpoint.names:
            raise BuoyError(
                "the newest checkpoint was not saved by a buoy.Run",
                received=f"{checkpoint.folder}: {', '.join(checkpoint.names)}",
                expected="a checkpoint with the place of a PyTorch run",
                hint="use a folder of its own for each training",
            )
        whole: Any = checkpoint.value(OURS, kept)
        ranks = len(whole["ranks"])
        if ranks != self._world:
            raise BuoyError(
                "the checkpoint was saved with another number of processes",
                received=f"{ranks} in the checkpoint, {self._world} now",
                expected="the same number: each rank has a place in the data of its own",
                hint=f"start {ranks} processes, or a new run in another folder",
            )
        return whole


_open: weakref.WeakValueDictionary[str, TrainingLoop] = weakref.WeakValueDictionary()


def close_earlier(folder: str | None, say: Callable[[str], None]) -> None:
    """Finish the run that this process had on the folder, if any."""
    if folder is None:
        return
    before = _open.get(os.path.realpath(folder))
    if before is not None:
        say(f"another Run on {printable(folder)} was open in this process; it is closed now")
        before.finish()


def opened(run: TrainingLoop) -> None:
    """This run has its folder now; it is finished when the process ends well."""
    if run.folder is not None:
        _open[os.path.realpath(run.folder)] = run
    atexit.register(_finish_at_exit, weakref.ref(run), os.getpid())


def closed(run: TrainingLoop) -> None:
    """Its folder is free."""
    if run.folder is not None and _open.get(os.path.realpath(run.folder)) is run:
        del _open[os.path.realpath(run.folder)]


def _finish_at_exit(reference: weakref.ref[TrainingLoop], pid: int) -> None:
    run = reference()
    if run is None or pid != os.getpid():  # a forked worker is not the training
        return
    if getattr(sys, "last_value", None) is None:  # not after an exception: a step may have been half done
        run.save_the_end(is_known=False)
    run.finish()
