"""`buoy.Run`: a PyTorch training that resumes, after any death, bit for bit where it was saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from buoy.flight.last_words import leave_out_ours
from buoy.machine.process import is_rehearsal
from buoy.training.loop import TrainingLoop
from buoy.training.options import Options, run_folder
from buoy.training.position import Batches

if TYPE_CHECKING:
    from buoy.checkpoint.retention import Keep
    from buoy.checkpoint.saver import Receipt
    from buoy.planner.result import Plan


class Run:
    """A training that can be killed at any moment and resumes from its last checkpoint, bit for bit.

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
        from buoy.torch.step import ranks

        options = Options(
            mirror=mirror, time_limit=time_limit, disk=disk, save=save, keep=keep, seed=seed,
            micro_batch=micro_batch, inexact=inexact, memory_cap=memory_cap, remedies=remedies, plan=plan,
        )  # fmt: skip
        rank, _ = ranks.world()
        self._is_rehearsal = is_rehearsal()
        self.folder = run_folder(folder) if folder is not None and not self._is_rehearsal else None
        """The run folder; None when nothing is kept."""
        self._loop = TrainingLoop(self.folder, options, rank)
        self.resumed = bool(self._loop.start)
        """Whether this process resumes from a checkpoint."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._loop.save_the_end()
        self.finish()

    def __repr__(self) -> str:
        return f"<buoy.Run {self.folder or 'without a folder'}, step {self.step}>"

    def _repr_html_(self) -> str:
        from buoy.view.cards import run_card

        attempt = getattr(getattr(self._loop.manager, "recorder", None), "attempt", None)
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
        buoy.checkpoint.values.CannotTrack: best cannot be restored in place: it is a plain value
          received: best=0.0
          expected: something that can be changed in place
          hint: keep it in a dict: `counters = {'best': ...}; run.track(counters=counters)`
        """
        self._loop.track(objects)

    def metric(self, **values: float) -> None:
        """Report figures such as `val_loss=0.3`: they are stored with the checkpoint of this step.

        >>> Run().metric(val_loss=0.3)
        """
        plain = {name: float(value) for name, value in values.items()}
        if self._loop.saves is not None:
            self._loop.saves.measured(plain, in_batch=self._loop.position.has_open_loops)

    # -- the loop ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far, or batches when no optimizer is tracked.

        They are those of the first tracked optimizer, or of one that trains where that one does not.
        """
        return self._loop.step

    @property
    def batch(self) -> int:
        """Batches that the loop has handed out in this pass, those before a resume included."""
        return self._loop.batch

    @property
    def epoch(self) -> int:
        """The epoch that is under way."""
        return self._loop.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run is up to `count`; each end is a safe point.

        >>> list(Run().epochs(2))
        [0, 1]
        """
        loop = self._loop
        was_interrupted = loop.in_epochs
        if was_interrupted:  # a notebook's cell, and it is run again: resume where it was
            loop.position = loop.position.again()
        loop.in_epochs = loop.counts_epochs = True
        if loop.start and not loop.epochs_before:
            loop.step = loop.start.step
        before, first = loop.epochs_before, loop.position.first_epoch
        if self.resumed and first >= before + count:
            if not loop.start.finished:
                loop.say(f"training is already complete ({count} epochs, step {self.step})")
            loop.random.return_to_place()  # what comes after the loop draws as it did the first time
        to_train = range(max(before, first), before + count)
        if loop.start.finished and to_train:
            loop.say(f"training continues from step {self.step}, epoch {to_train[0] + 1} of {before + count}")
        if not was_interrupted and not loop.is_finished:
            loop.again.epochs_begin(count, len(to_train), self.step)
        try:
            for epoch in to_train:
                loop.begin_epoch(epoch, before + count, is_first=epoch == to_train[0])
                yield epoch - before
                loop.end_epoch(last=epoch + 1 == before + count)
        finally:
            loop.profiling.leave(loop.whole_step)
        loop.epochs_before += count
        loop.in_epochs = False
        loop.again.epochs_ended()

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The loader's batches, from where the run is; between two of them the run may be saved.

        >>> list(Run().batches([1, 2, 3]))
        [1, 2, 3]
        """
        return Batches(loader, self._loop.begin)

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
        __tracebackhide__ = True  # IPython leaves such frames out: what failed are the user's own lines
        if self._is_rehearsal:  # `buoy plan` reads the step as it is
            loss = loss_fn(batch)
            loss.backward()
            return loss
        try:
            return self._loop.micro.backward(batch, loss_fn, reduction=reduction, split=split, scaler=scaler)
        except BaseException as error:
            leave_out_ours(error)
            raise

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, *, pin: str | None = None) -> Receipt | None:
        """Save now; belongs at the end of a batch's body or of an epoch's. `pin` keeps it for good, under that name.

        In the middle of a gradient accumulation it waits for the optimizer's step, and returns None. So it does on the
        way back to the place where the run resumes: what is saved there is saved already.

        >>> Run().save() is None
        True
        """
        __tracebackhide__ = True
        return self._loop.save_now(pin)

    def profile(self, steps: int = 3) -> None:
        """Hand the next steps to torch's own profiler, then print where their time went and what holds memory.

        The first two steps are not measured: they warm up. Where the loop ends early, what there is is printed.
        The trace for Perfetto and TensorBoard is written to `<run>/profiles/`.

        >>> Run().profile(steps=2)
        """
        self._loop.profiling.ask(steps)

    def finish(self) -> None:
        """Wait until the last checkpoint is safe, and let go of the run folder. Called at exit by itself.

        >>> Run().finish()
        """
        self._loop.finish()
