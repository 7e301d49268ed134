"""`buoy.Run`: a PyTorch training that goes on, after any death, bit for bit where it was saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.retention import Keep
from buoy.checkpoint.store import Receipt
from buoy.flight.last_words import leave_out_ours
from buoy.flight.profile import Profiler, Profiling
from buoy.planner.rehearsal import is_rehearsal
from buoy.training import arguments, open_runs, planned
from buoy.training.again import Again
from buoy.training.batches import Batches
from buoy.training.follower import Follower
from buoy.training.keeper import Keeper
from buoy.training.loaders import Loaders
from buoy.training.micro_batches import MicroBatches
from buoy.training.position import Loop, Position, Way
from buoy.training.randomness import Randomness
from buoy.training.resumption import Resumption
from buoy.training.saves import Saves
from buoy.training.saying import say
from buoy.training.tracking import Tracking

if TYPE_CHECKING:
    from buoy.planner.model import Plan


class Run:
    """A training that can be killed at any moment and goes on from its last checkpoint, bit for bit.

    Built on a folder that has checkpoints it resumes from the newest good one: `track` loads, `epochs` and `batches`
    continue where they were. `Run()` without a folder keeps nothing on disk. What is saved, and when it is exact,
    is in `buoy explain resume`.

    >>> import torch, buoy
    >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> run = buoy.Run("runs/lines", save=100)
    >>> run.track(model=model, optimizer=optimizer)
    >>> for epoch in run.epochs(2):
    ...     for x, y in run.batches(loader):
    ...         loss = torch.nn.functional.mse_loss(model(x), y)
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    >>> run.step
    8
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
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
        from buoy.torch import data, distributed

        arguments.check(
            seed=seed, micro_batch=micro_batch, inexact=inexact, remedies=remedies, memory_cap=memory_cap,
            mirror=mirror, disk=disk, plan=plan,
        )  # fmt: skip
        self._rank, _ = distributed.world()
        self.folder = arguments.run_folder(folder) if folder is not None and not is_rehearsal() else None
        """The run folder; None when nothing is kept."""
        open_runs.close_earlier(self.folder, self._say)
        self._keeper: Keeper | Follower | None = None
        if self.folder is not None and self._rank:
            self._keeper = Follower(self.folder)
        elif self.folder is not None:
            self._keeper = Keeper(
                self.folder, mirror=mirror, time_limit=time_limit, disk=disk, save=save, keep=keep
            )
        self._from = Resumption(self._keeper, self._say)
        step, keeper = self._from.step, self._keeper
        self._saves = Saves(keeper, keep, self._say, step) if keeper is not None else None
        self.resumed = bool(self._from)
        """Whether this process goes on from a checkpoint."""
        self.step = step
        """Optimizer steps of the run so far (of the first tracked optimizer, or of one that trains where that one does
        not), or batches when none is tracked."""
        self.batch = 0
        """Batches that the loop has handed out in this pass, those before a resume included."""
        self._feeds = data.Feeds(self._say, is_saved=self._keeper is not None)
        with self._from.reading("what the run kept of itself"):
            self._position = Position(self._from.mine.get("position"))
            self._random = Randomness(self._from, seed, self._say)
            self._loaders = Loaders(self._feeds, self._from.mine.get("loaders"))
            self._tracking = Tracking(self._from, self._on_step, self._say)
        if self._from.finished:
            self._from.announce()
        self._micro = MicroBatches(
            self.folder,
            self._from.micro_batch,
            {
                "say": self._say,
                "event": self._event,
                "micro_batch": (plan.micro_batch or None) if plan and micro_batch is None else micro_batch,
                "inexact": inexact,
                "memory_cap": memory_cap,
                "remedies": remedies,
            },
            self._rank,
        )
        try:
            self._micro.begin_early()
        except BaseException:
            if self._keeper is not None:
                self._keeper.finish()
            raise
        self._epochs_before = 0
        self._plan = plan
        planned.record(plan, self._event)
        self._in_epochs = self._counts_epochs = self._finished = False
        self._profiling = Profiling(self._say)
        self._again = Again(self._say, self.folder)
        open_runs.opened(self)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._save_the_end()
        self.finish()

    def __repr__(self) -> str:
        return f"<buoy.Run {self.folder or 'without a folder'}, step {self.step}>"

    def _repr_html_(self) -> str:
        from buoy.view.run_card import run_card

        attempt = getattr(getattr(self._keeper, "recorder", None), "attempt", None)
        return run_card(repr(self), attempt, str(self.folder), self.step)

    # -- what is saved ----------------------------------------------------------------------------------------

    def track(self, **objects: object) -> None:
        """Name what belongs to the run; on resume each is loaded at once, or none if any does not fit.

        Models, optimizers, schedulers, scalers, EMA, anything with `state_dict` and `load_state_dict`; dicts and
        lists are restored in place. A loader may be named too: its place is kept by `batches`.

        >>> Run().track(counters={"best": 0.0})
        >>> Run().track(best=0.0)
        Traceback (most recent call last):
            ...
        buoy.checkpoint.values.CannotTrack: best cannot be put back: it is a plain value
          received: best=0.0
          expected: something that can be changed in place
          hint: keep it in a dict: `counters = {'best': ...}; run.track(counters=counters)`
        """
        late = self._counts_epochs or self._position.has_begun
        self._micro.track(*self._tracking.add(objects, late=late))
        self._position.counts_steps = self._tracking.counts_steps
        if self._position.is_known_to_what_is_tracked:
            self._random.return_to_place()
            self._again.draws_go_on()

    def metric(self, **values: float) -> None:
        """Report figures such as `val_loss=0.3`: they are stored with the checkpoint of this step.

        >>> Run().metric(val_loss=0.3)
        """
        plain = {name: float(value) for name, value in values.items()}
        if self._saves is not None:
            self._saves.measured(plain, in_batch=self._position.has_open_loops)

    # -- the loop ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is under way."""
        return max(0, self._position.epoch - self._epochs_before)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run is up to `count`; each end is a safe point.

        >>> list(Run().epochs(2))
        [0, 1]
        """
        was_interrupted = self._in_epochs
        if was_interrupted:  # a notebook's cell, and it is run again: go on where it was
            self._position = self._position.again()
        self._in_epochs = self._counts_epochs = True
        if self._from and not self._epochs_before:
            self.step = self._from.step
        before, first = self._epochs_before, self._position.first_epoch
        if self.resumed and first >= before + count:
            if not self._from.finished:
                self._say(f"all {count} epochs are done already (step {self.step}); nothing is left to do")
            self._random.return_to_place()  # what comes after the loop draws as it did the first time
        to_train = range(max(before, first), before + count)
        if self._from.finished and to_train:
            self._say(f"training on from step {self.step}, epoch {to_train[0] + 1} of {before + count}")
        if not was_interrupted and not self._finished:
            self._again.epochs_begin(count, len(to_train), self.step)
        try:
            for epoch in to_train:
                self._position.begin_epoch(epoch)
                if self._keeper is not None:
                    whole = not self._position.is_returning
                    self._keeper.epoch_begins(epoch, before + count, self.step, is_whole=whole)
                if self._position.is_returning:
                    self._random.return_to_way()
                elif epoch == to_train[0]:
                    self._random.return_to_place()
                self._random.begin_way()
                yield epoch - before
                self._end_epoch(last=epoch + 1 == before + count)
        finally:
            self._profiling.leave(self._whole_step)
        self._epochs_before += count
        self._in_epochs = False
        self._again.epochs_ended()

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The loader's batches, from where the run is; between two of them the run may be saved.

        >>> list(Run().batches([1, 2, 3]))
        [1, 2, 3]
        """
        return Batches(loader, self._begin_loop)

    def backward(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        *,
        reduction: str = "mean",
        split: Callable[..., Any] | None = None,
        scaler: Any = None,
    ) -> Any:
        """Forward and backward over the batch, in micro-batches where it does not fit; the loss of the whole batch.

        >>> import torch
        >>> model, run = torch.nn.Linear(4, 1), Run()
        >>> run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
        >>> loss = run.backward(torch.randn(8, 4), lambda part: model(part).square().mean())
        """
        __tracebackhide__ = True  # IPython leaves such frames out: what failed are the person's own lines
        if is_rehearsal():  # `buoy plan` reads the step as it is
            loss = loss_fn(batch)
            loss.backward()
            return loss
        try:
            return self._micro.backward(batch, loss_fn, reduction=reduction, split=split, scaler=scaler)
        except BaseException as error:
            leave_out_ours(error)
            raise

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, *, pin: str | None = None) -> Receipt | None:
        """Save now; belongs at the end of a batch's body or of an epoch's. `pin` keeps it for good, under that name.

        In the middle of a gradient accumulation it waits for the optimizer's step, and returns None. So it does on the
        way back to the place where the run goes on: what is saved there is saved already.

        >>> Run().save() is None
        True
        """
        if self._saves is not None and not self._position.is_between_steps:
            self._saves.wish("user", pin)
            return None
        way = self._position.come_by_save()
        if way is Way.BEFORE or (way and self._from.finished):
            return None  # made when the script came by the first time
        if way is not None:
            self._arrive(here=way is Way.THERE)
            if way is Way.THERE:
                return None
        epoch_done = (
            self._in_epochs
            and not self._position.has_open_loops
            and not self._position.is_before_the_first_step
        )
        self._position.is_called_done = epoch_done
        return self._save("user", pin=pin, epoch_done=epoch_done)

    def profile(self, steps: int = 3) -> None:
        """Hand the next steps to torch's own profiler, then print where their time went and what was kept.

        The first two steps are not measured: they warm up. Where the training ends early, what there is is printed.
        The trace for Perfetto and TensorBoard is written to `<run>/profiles/`.

        >>> Run().profile(steps=2)
        """
        self._profiling.ask(steps)

    def finish(self) -> None:
        """Wait until the last checkpoint is safe, and let go of the run folder. Called at exit by itself.

        >>> Run().finish()
        """
        if self._finished:
            return
        self._finished = True
        if self._position.was_missed:
            self._from.say_missed()
        self._profiling.close()
        self._tracking.let_go()
        if not self._rank:
            planned.compare(self._plan, self._event, self._say)
        if self._keeper is not None:
            self._keeper.finish()
        open_runs.closed(self)

    def _save(
        self, reason: str, *, pin: str | None = None, epoch_done: bool = False, finished: bool = False
    ) -> Receipt | None:
        __tracebackhide__ = True
        if self._saves is None or self._finished:
            return None
        return self._saves.save(
            self._tracking.things,
            self._own_state(epoch_done=epoch_done),
            step=self.step,
            epoch=self.epoch if self._counts_epochs else None,
            reason=reason,
            pin=pin,
            finished=finished,
            finite=self._is_finite(),
        )

    def _own_state(self, *, epoch_done: bool = False) -> dict[str, Any]:
        """What a run keeps about itself, of this rank."""
        return {
            "position": self._position.describe(epoch_done=epoch_done),
            "loaders": self._loaders.state(self._position.under_way),
            **self._tracking.state(),
            **self._random.state(),
            "micro_batch": self._micro.state(),
        }

    def _is_finite(self) -> bool | None:
        """Whether loss and weights are still numbers; None where nobody can tell."""
        from buoy.torch.finite import weights_are_lost

        return False if weights_are_lost(self._tracking.objects.values()) else self._micro.is_finite()

    def _safe_point(self, *, epoch_done: bool = False, finished: bool = False) -> None:
        """Save if anybody wants that; every rank comes here."""
        __tracebackhide__ = True
        self._profiling.between_steps(self.step, self._new_profile)
        if self._saves is None:
            return
        reason, pin = self._saves.due(self.step, "finished" if finished else "")
        if reason:
            self._save(reason, pin=pin, epoch_done=epoch_done, finished=finished)

    @property
    def _whole_step(self) -> int | None:
        """The step, unless it is half done; without an optimizer nobody can tell."""
        position = self._position
        return self.step if position.counts_steps and position.is_between_steps else None

    def _new_profile(self) -> Profiler:
        from buoy.torch.profile import profile_of

        return profile_of(self.folder, self._tracking.objects.values())

    def _end_epoch(self, *, last: bool) -> None:
        if self._saves is not None:
            self._saves.best_metric.epoch_ends()
        # At the very end a gradient that still waits for a step is of no use to anybody.
        if self.step and (last or self._position.is_settled):
            self._safe_point(epoch_done=True, finished=last)
        self._position.is_called_done = False  # it has come to its end
        if last:
            self._profiling.close()
        if not self._position.is_returning:  # also where nothing was read through `batches`
            self._from.forget()

    def _save_the_end(self, *, is_known: bool = True) -> None:
        """The last checkpoint; not `is_known` where a loop that was left early may have been left by `sys.exit()`."""
        if self._finished or not self.step or self._from or self._saves is None:
            return  # it was ended before, or nothing was trained here
        if not self._position.is_settled:
            return  # a step is half done
        if not is_known and self._position.reopen_what_was_left():
            if self._saves.step != self.step:
                self._save("exit")
            if not self._saves.was_stopped:
                self._say(
                    f"the loop was left before its end, at step {self.step}: started again, the training goes on "
                    "there. If it is done, `with buoy.Run(...) as run:` around the loop says so"
                )
        elif not self._position.has_open_loops and self._saves.finished_step != self.step:
            self._save("finished", epoch_done=self._in_epochs, finished=True)

    # -- inside the loop --------------------------------------------------------------------------------------

    def _begin_loop(self, loader: Any) -> Iterator[Any]:
        if self._finished:
            self._again.used_after_finish(self.step)
        return self._walk(loader, self._position.begin_loop(id(loader)))

    def _walk(self, loader: Any, loop: Loop) -> Iterator[Any]:
        self._loaders.begin(loop, loader, self._tracking.objects.values())
        if loop.done:
            self._random.return_to_way()
            return
        from buoy.torch.data import Pass, Place

        __tracebackhide__ = True
        position, exhausted, counts_batches = self._position, False, not self._position.counts_steps
        again: Pass | None = None
        try:
            self._arrive()
            place = Place(self._random.seed, self._rank, position.epoch, loop.number)
            with self._keeper.loop() if self._keeper is not None else nullcontext():
                feed = self._feeds.open(loader, place, loop.saved)
                loop.place = feed.state_dict
                while True:
                    if safe := position.asked(loop):
                        self._safe_point()
                    elif self._saves is not None:
                        self._saves.postpone(self.step)
                    try:
                        batch = next(feed)
                    except StopIteration:
                        exhausted = True
                        return
                    except Exception:
                        # A signal may have ended the loader's workers too.
                        if again is not None or self._saves is None or not self._saves.is_stopping:
                            raise
                        if safe and self._saves.is_alone:
                            self._safe_point()
                        again = self._feeds.reopen(loader, place, feed)
                        if again is None:
                            raise
                        feed = again
                        loop.place = feed.state_dict
                        continue
                    self.batch = feed.batches
                    if self._saves is not None and (loop.trains or counts_batches):
                        self._saves.weights_change()
                    position.hand_out(loop)
                    if not loop.nested:
                        self._tracking.counting.batch_begins()
                    if counts_batches:
                        self.step += 1
                    yield batch
        except BaseException as error:
            leave_out_ours(error)
            raise
        finally:
            position.end_loop(loop, exhausted=exhausted)
            if not loop.nested:
                self._tracking.counting.loop_ends()
            if not exhausted and (loop.trains or counts_batches):
                self._profiling.leave(self._whole_step)
            if not loop.nested:
                self._random.begin_way()

    def _arrive(self, *, here: bool = False) -> None:
        """The first loop with work to do begins; after a resume this is the saved place. `here`: it is for certain."""
        self._tracking.look_over(self._keeper, self.step, self._own_state)
        if self._position.arrive():
            # Steps on the way, of a search for the learning rate, were counted before.
            self.step = self._from.step
            if here or self._position.repeats:
                # A scheduler stepped or a sum cleared at the epoch's start is in the checkpoint already: undo it.
                self._tracking.load_again()
            self._random.return_to_place()
        self._from.load_late()
        self._from.forget()

    def _on_step(self, counts: bool) -> None:
        self._claim_step()
        if self._position.is_known_to_what_is_tracked:
            self._position.arrive()
            self._from.forget()
        if self._saves is not None and not self._position.has_open_loops:
            self._saves.stepped_outside()
        if self._position.is_called_done:
            self._again.epoch_trains_on(self.epoch, self._saves.step if self._saves is not None else None)
        self.step += counts
        self._position.stepped()
        if counts:
            self._micro.stepped()

    def _claim_step(self) -> None:
        if isinstance(self._keeper, Keeper):
            self._keeper.recorder.claims(self._keeper.folder, self.step)

    def _say(self, text: str) -> None:
        if not self._rank:
            say(text)

    def _event(self, kind: str, **values: object) -> None:
        if self._keeper is not None:
            self._keeper.recorder.event(kind, **values)
