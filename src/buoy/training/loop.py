"""The loop of a training under buoy: where it is, what belongs to it, when it is saved, and how it is found again.

`buoy.Run` is its face for a loop that the user writes. What happens between two steps happens here: a batch is asked
for, a safe point may be saved, a step is counted; after a resume the script comes by the same way until it has arrived
at the saved place. What asks a loop for its batches (`begin`) and says that an epoch begins or ends is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from buoy.flight.last_words import leave_out_ours
from buoy.flight.profile import Profiler, Profiling
from buoy.microbatch.sizing import SizeLog
from buoy.training import recording, resume
from buoy.training.messages import note_nothing, say, say_nothing
from buoy.training.options import Options
from buoy.training.position import Again, Loop, Position, Way
from buoy.training.resume import Resumption
from buoy.training.tracking import Loaders, Randomness, Tracking

if TYPE_CHECKING:
    from buoy.checkpoint.saver import Receipt
    from buoy.training.manager import CheckpointManager
    from buoy.training.ranks import Follower, Saves


class TrainingLoop:
    """One training of this process, on one rank."""

    def __init__(self, folder: str | None, options: Options, rank: int) -> None:
        from buoy.torch.data import loader as data

        self.folder, self._rank = folder, rank
        self.say = say_nothing if rank else say
        resume.close_earlier(folder, self.say)
        self.manager = manager = _manager(folder, options, rank)
        event = manager.recorder.event if manager is not None else note_nothing
        self.start = Resumption(manager, self.say)
        """The checkpoint that it resumes from, until it is past that."""
        self.step = self.start.step
        self.batch = 0
        self.saves: Saves | None = None
        if manager is not None:
            from buoy.training.ranks import Saves

            self.saves = Saves(manager, options.keep, self.say, self.step)
        self._feeds = data.Feeds(self.say, is_saved=manager is not None)
        with self.start.reading("what the run kept of itself"):
            self.position = Position(self.start.mine.get("position"))
            self.random = Randomness(self.start, options.seed, self.say)
            self._loaders = Loaders(self._feeds, self.start.mine.get("loaders"))
            self.tracking = Tracking(self.start, self._on_step, self.say)
        if self.start.finished:
            self.start.announce()
        settings = {"say": self.say, "event": event, **options.steps}
        try:
            self.micro = MicroBatches(folder, self.start.micro_batch, settings, rank)
        except BaseException:
            if manager is not None:
                manager.finish()
            raise
        self.profiling = Profiling(self.say)
        self.again = Again(self.say, folder)
        self.epochs_before = 0
        """Epochs that earlier calls of `epochs` have had."""
        self.in_epochs = self.counts_epochs = self.is_finished = False
        plan = options.plan if not rank else None
        self._compare_with_plan = partial(recording.compare, plan, event, self.say)
        recording.record_plan(plan, event)
        resume.opened(self)

    @property
    def epoch(self) -> int:
        """The epoch that is under way."""
        return max(0, self.position.epoch - self.epochs_before)

    # -- on its way -------------------------------------------------------------------------------------------

    def track(self, objects: dict[str, object]) -> None:
        """Name what belongs to it; what was saved of that is loaded."""
        late = self.counts_epochs or self.position.has_begun
        self.micro.track(*self.tracking.add(objects, late=late))
        self.position.counts_steps = self.tracking.counts_steps
        if self.position.is_known_to_what_is_tracked:
            self.random.return_to_place()
            self.again.draws_go_on()

    def begin_epoch(self, epoch: int, of: int, *, is_first: bool) -> None:
        """The script begins this epoch (from 0, in all calls of `epochs`); `is_first`: of those left to train."""
        self.position.begin_epoch(epoch)
        if self.manager is not None:
            self.manager.epoch_begins(epoch, of, self.step, is_whole=not self.position.is_returning)
        if self.position.is_returning:
            self.random.return_to_way()
        elif is_first:
            self.random.return_to_place()
        self.random.begin_way()

    def end_epoch(self, *, last: bool) -> None:
        """The script has ended the epoch that is under way: a safe point; `last`: of all that were asked for."""
        if self.saves is not None:
            self.saves.best_metric.epoch_ends()
        # At the very end a gradient that still waits for a step is of no use to anybody.
        if self.step and (last or self.position.is_settled):
            self._safe_point(epoch_done=True, finished=last)
        self.position.is_called_done = False  # it has come to its end
        if last:
            self.profiling.close()
        if not self.position.is_returning:  # also where nothing was read through `batches`
            self.start.forget()

    def begin(self, loader: Any) -> Iterator[Any]:
        """The script begins to iterate over batches: those from where the training is."""
        if self.is_finished:
            self.again.used_after_finish(self.step)
        return self._walk(loader, self.position.begin_loop(id(loader)))

    def _walk(self, loader: Any, loop: Loop) -> Iterator[Any]:
        self._loaders.begin(loop, loader, self.tracking.objects.values())
        if loop.done:
            self.random.return_to_way()
            return
        from buoy.torch.data.replay import Pass, Place

        __tracebackhide__ = True
        position, exhausted, counts_batches = self.position, False, not self.position.counts_steps
        again: Pass | None = None
        try:
            self._arrive()
            place = Place(self.random.seed, self._rank, position.epoch, loop.number)
            with self.manager.loop() if self.manager is not None else nullcontext():
                feed = self._feeds.open(loader, place, loop.saved)
                loop.place = feed.state_dict
                while True:
                    if safe := position.asked(loop):
                        self._safe_point()
                    elif self.saves is not None:
                        self.saves.postpone(self.step)
                    try:
                        batch = next(feed)
                    except StopIteration:
                        exhausted = True
                        return
                    except Exception:
                        # A signal may have ended the loader's workers too.
                        if again is not None or self.saves is None or not self.saves.is_stopping:
                            raise
                        if safe and self.saves.is_alone:
                            self._safe_point()
                        again = self._feeds.reopen(loader, place, feed)
                        if again is None:
                            raise
                        feed = again
                        loop.place = feed.state_dict
                        continue
                    self.batch = feed.batches
                    if self.saves is not None and (loop.trains or counts_batches):
                        self.saves.weights_change()
                    position.hand_out(loop)
                    if not loop.nested:
                        self.tracking.counting.batch_begins()
                    if counts_batches:
                        self.step += 1
                    yield batch
        except BaseException as error:
            leave_out_ours(error)
            raise
        finally:
            position.end_loop(loop, exhausted=exhausted)
            if not loop.nested:
                self.tracking.counting.loop_ends()
            if loop.trains or counts_batches:
                self.profiling.leave(self.whole_step, is_early=not exhausted)
            if not loop.nested:
                self.random.begin_way()

    def _arrive(self, *, here: bool = False) -> None:
        """The first loop with work to do begins; after a resume this is the saved place. `here`: it is for certain."""
        self.tracking.look_over(self.manager, self.step, self._own_state)
        if self.position.arrive():
            # Steps on the way, of a search for the learning rate, were counted before.
            self.step = self.start.step
            if here or self.position.repeats:
                # A scheduler stepped or a sum cleared at the epoch's start is in the checkpoint already: undo it.
                self.tracking.load_again()
            self.random.return_to_place()
        self.start.forget()

    def _on_step(self, counts: bool) -> None:
        if self.manager is not None:
            self.manager.claim_step(self.step)
        if self.position.is_known_to_what_is_tracked:
            self.position.arrive()
            self.start.forget()
        if self.saves is not None and not self.position.has_open_loops:
            self.saves.stepped_outside()
        if self.position.is_called_done:
            self.again.epoch_trains_on(self.epoch, self.saves.step if self.saves is not None else None)
        self.step += counts
        self.position.stepped()
        if counts:
            self.micro.stepped()

    # -- saving -----------------------------------------------------------------------------------------------

    def save_now(self, pin: str | None) -> Receipt | None:
        """The script asks for it: now, once the step is whole, or not again on the way to the saved place."""
        if self.saves is not None and not self.position.is_between_steps:
            self.saves.wish("user", pin)
            return None
        way = self.position.come_by_save()
        if way is Way.BEFORE or (way and self.start.finished):
            return None  # made when the script came by the first time
        if way is not None:
            self._arrive(here=way is Way.THERE)
            if way is Way.THERE:
                return None
        epoch_done = (
            self.in_epochs and not self.position.has_open_loops and not self.position.is_before_the_first_step
        )
        self.position.is_called_done = epoch_done
        return self._save("user", pin=pin, epoch_done=epoch_done)

    def save_the_end(self, *, is_known: bool = True) -> None:
        """The last checkpoint; not `is_known` where a loop that was left early may have been left by `sys.exit()`."""
        if self.is_finished or not self.step or self.start or self.saves is None:
            return  # it was ended before, or nothing was trained here
        if not self.position.is_settled:
            return  # a step is half done
        if not is_known and self.position.reopen_what_was_left():
            if self.saves.step != self.step:
                self._save("exit")
            if not self.saves.was_stopped:
                self.say(
                    f"the loop ended early, at step {self.step}: if you start it again, the training resumes "
                    "there. If the training is done, put the loop into `with buoy.Run(...) as run:`"
                )
        elif not self.position.has_open_loops and self.saves.finished_step != self.step:
            self._save("finished", epoch_done=self.in_epochs, finished=True)

    def _save(
        self, reason: str, *, pin: str | None = None, epoch_done: bool = False, finished: bool = False
    ) -> Receipt | None:
        __tracebackhide__ = True
        if self.saves is None or self.is_finished:
            return None
        return self.saves.save(
            self.tracking.things,
            self._own_state(epoch_done=epoch_done),
            step=self.step,
            epoch=self.epoch if self.counts_epochs else None,
            reason=reason,
            pin=pin,
            finished=finished,
            finite=self._is_finite(),
        )

    def _own_state(self, *, epoch_done: bool = False) -> dict[str, Any]:
        """What a run keeps about itself, of this rank."""
        return {
            "position": self.position.describe(epoch_done=epoch_done),
            "loaders": self._loaders.state(self.position.under_way),
            **self.tracking.state(),
            **self.random.state(),
            "micro_batch": self.micro.state(),
        }

    def _is_finite(self) -> bool | None:
        """Whether loss and weights are still numbers; None where nobody can tell."""
        from buoy.torch.memory.holders import weights_are_lost

        return False if weights_are_lost(self.tracking.objects.values()) else self.micro.is_finite()

    def _safe_point(self, *, epoch_done: bool = False, finished: bool = False) -> None:
        """Save if anybody wants that; every rank comes here."""
        __tracebackhide__ = True
        self.profiling.between_steps(self.step, self._new_profile)
        if self.saves is None:
            return
        reason, pin = self.saves.due(self.step, "finished" if finished else "")
        if reason:
            self._save(reason, pin=pin, epoch_done=epoch_done, finished=finished)

    @property
    def whole_step(self) -> int | None:
        """The step, unless it is half done; without an optimizer nobody can tell."""
        position = self.position
        return self.step if position.counts_steps and position.is_between_steps else None

    def _new_profile(self) -> Profiler:
        from buoy.torch.profile import profile_of

        return profile_of(self.folder, self.tracking.objects.values())

    def finish(self) -> None:
        """Wait until the last checkpoint is safe, and release the run folder; at exit this happens by itself."""
        if self.is_finished:
            return
        self.is_finished = True
        if self.position.was_missed:
            self.start.say_missed()
        self.profiling.close()
        self.tracking.let_go()
        self._compare_with_plan()
        if self.manager is not None:
            self.manager.finish()
        resume.closed(self)


def _manager(folder: str | None, options: Options, rank: int) -> CheckpointManager | Follower | None:
    if folder is None:
        return None
    if rank:
        from buoy.training.ranks import Follower

        return Follower(folder)
    from buoy.training.manager import CheckpointManager

    return CheckpointManager(folder, options)


LOG = "micro-batches.jsonl"


class MicroBatches:
    """The transaction around each training step, and the log by which a resumed run splits as it had split before."""

    def __init__(
        self,
        folder: str | None,
        saved: dict[str, Any] | None,
        settings: dict[str, Any],
        rank: int = 0,
        make: Callable[..., Any] | None = None,
    ) -> None:
        """`make`: the transaction of a guard, from the settings."""
        name = LOG if not rank else f"micro-batches.{rank}.jsonl"
        self._log = SizeLog(os.path.join(folder, name)) if folder is not None else None
        self._saved = saved
        # A notebook's kernel trains several runs under one recorder.
        self._settings = {**settings, "event": partial(settings["event"], path=folder), "log": self._log}
        self._make = make
        self._transaction: Any = None
        self._is_checked = False
        given = settings.get("remedies") or ()
        self._remedies = [given] if isinstance(given, str) else list(given)
        self._is_early = bool(given) or settings.get("memory_cap") is not None
        if self._is_early:  # what is switched on for the whole run is switched on now
            self._begin()

    def track(self, *objects: object) -> None:
        """These are trained; the optimizers' steps become atomic once `backward` is used."""
        from buoy.torch.state.state_dict import calls_backward_itself, parts

        trained = parts(objects)
        if not any(trained):
            return
        if self._transaction is None:
            self._begin()
        self._transaction.expect(*trained)
        if self._is_early or any(map(calls_backward_itself, objects)):
            self._transaction.take_hold()

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Forward and backward as a transaction; once something is tracked this name is the transaction's own."""
        __tracebackhide__ = True
        if self._transaction is None:
            self._begin()
        return self._transaction.backward(*arguments, **options)

    def is_finite(self) -> bool | None:
        """Whether the last loss is a finite number; None where `backward` was never used."""
        from buoy.torch.memory.holders import is_finite

        return is_finite(self._transaction.last_loss if self._transaction is not None else None)

    def stepped(self) -> None:
        """An optimizer has stepped: say so once if what was asked for could not act on that step."""
        if self._is_checked:
            return
        self._is_checked = True
        if "amp" in self._remedies and not self._transaction.steps:
            self._settings["say"](
                'remedies="amp" acts inside `run.backward(batch, loss_fn)`; this loop calls `.backward()` itself, so '
                "nothing is in mixed precision"
            )

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint; None where `backward` was never used."""
        if self._transaction is None or not self._transaction.is_used:
            return self._saved
        return {**self._transaction.state_dict(), "remedies": self._remedies}

    def _begin(self) -> None:
        from buoy.torch.step.transaction import Transaction

        self._transaction = transaction = (self._make or Transaction)(**self._settings)
        self.backward = transaction.backward  # type: ignore[method-assign]
        if self._saved is not None:
            then, now = self._saved.get("remedies", []), self._remedies
            if then != now:
                self._settings["say"](
                    f"remedies are {', '.join(now) or 'none'}; until here they were {', '.join(then) or 'none'}, "
                    "so the numbers differ from those of an uninterrupted run"
                )
            transaction.load_state_dict(self._saved)
            if self._log is not None:
                transaction.replay(*self._log.read())
        elif self._log is not None:
            self._log.clear()
