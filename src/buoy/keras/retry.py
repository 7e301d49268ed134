"""A step repeated until it went through: smaller after each want of memory, undone where it had begun to write."""

from __future__ import annotations

import traceback
from math import prod
from typing import Any, Protocol

import keras

from buoy.keras.sizes import Event, Rehearsed, Say, Sizes, count
from buoy.keras.snapshot import Snapshot
from buoy.microbatch.errors import BadBatch, CannotSplit, OutOfMemory, TornStep
from buoy.microbatch.history import SizeLog
from buoy.microbatch.oom import is_oom

_CAREFUL_STEPS = 64
"""For so many steps after the reserve was refused, copies are made before the optimizer's update."""
_UPDATE_TRIES = 3


class Step(Rehearsed, Protocol):
    """What is repeated."""

    def run(self, data: Any, count: int, reserve: bool) -> Any:
        """Do it in `count` micro-batches; `reserve`: only with room for the update."""

    def reached(self) -> int:
        """How far the last, failed run came: 0 not all is computed, 1 no room to write, 2 writing had begun."""

    def explained(self, error: Exception) -> Exception:
        """An error of the step in words."""

    def snapshot(self) -> Snapshot:
        """Copies of all that the step writes."""

    def too_big(self, text: str, what: str = "a single sample does") -> OutOfMemory:
        """The error when nothing is left to split, with what owns the memory."""


class Retry:
    """Decides sizes and repeats; what it learns is kept with the checkpoint."""

    def __init__(self, say: Say, event: Event, micro_batch: int | None) -> None:
        self._say = say
        self._event = event
        self._sizes = Sizes(say, event, micro_batch)
        self._careful = 0
        self._log = SizeLog(None)
        self.steps = 0
        """Steps that went through."""
        self.retries = 0

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Every change of size so far, for `replay`."""
        return self._sizes.entries

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {**self._sizes.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizes.load_state_dict(state)
        self.steps = int(state["steps"])

    def replay(self, sizes: list[dict[str, Any]], done: int = 0) -> None:
        """Use these micro-batches from these steps on, as an earlier attempt did in so many steps."""
        self._sizes.replay(sizes, self.steps, done)

    def keep(self, log: SizeLog) -> None:
        """Log every step."""
        self._log = log

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the log knows of steps that were made after it and lost."""
        self.load_state_dict(saved)
        self.replay(*self._log.read())

    def run(self, functions: Step, data: Any) -> Any:
        """Do the step on this batch, as often and in as many micro-batches as it takes."""
        rows, each = _measure(data)
        size = self._sizes.choose(functions, self.steps, data, rows, each)
        tries, again = 0, True
        while True:
            failure, logs = self._try(functions, data, rows, size)
            if failure is None:
                break
            where, text = failure
            tries += where == "update"
            if where == "gradients" and size == 1 and again:
                again = False  # what the failed try held is free now: once more
            elif where == "gradients":
                smaller = self._smaller(functions, data, rows, each, size, text)
                self._tell(rows, size, smaller, text)
                size = smaller
            elif tries > _UPDATE_TRIES:
                raise OutOfMemory(
                    "the optimizer's update does not fit into memory, whatever the micro-batch",
                    received=text,
                    expected="room for the update's temporaries beside weights, gradients and optimizer state",
                    hint="`buoy plan` lists optimizers that hold less; nothing of this step was done",
                )
            else:
                self._careful = _CAREFUL_STEPS
                self.retries += 1
                self._event("retry", what="optimizer step", step=self.steps, error=text)
                self._say(
                    f"out of memory in the optimizer's update of step {self.steps}: undone and repeated"
                )
        self._done(rows, each, size)
        return logs

    def _try(self, functions: Step, data: Any, rows: int, size: int) -> tuple[tuple[str, str] | None, Any]:
        undo = None
        try:
            if self._careful:
                undo = functions.snapshot()
            reserve = not self._careful
            return None, functions.run(data, count(rows, size), reserve)
        except Exception as error:
            failed: BaseException = error
            if not is_oom(error):
                self._check_torn(functions.reached(), undo)
                explained = functions.explained(error)
                if explained is error:
                    raise
                raise explained from error
            text = _first_line(error)
        # Outside `except`: only now are the frames, and the tensors in them, gone.
        traceback.clear_frames(failed.__traceback__)
        del failed
        reached = functions.reached()
        if reached == 2:
            self._check_torn(reached, undo)
        return ("gradients" if reached == 0 else "update", text), None

    def _check_torn(self, reached: int, undo: Snapshot | None) -> None:
        if reached < 2:
            return
        if undo is not None:
            undo.restore()
            return
        raise TornStep(
            "the optimizer's update failed half-way, although there had been room for it",
            received=f"step {self.steps}",
            expected="an update that happens whole",
            hint="the weights are partly updated: run again, buoy goes on from the last checkpoint",
        )

    def _smaller(self, functions: Step, data: Any, rows: int, each: float, size: int, text: str) -> int:
        if size == 1:
            raise functions.too_big(text)
        try:
            functions.prepare(data)
        except CannotSplit:
            self._say(f"out of memory at step {self.steps} with {size} samples at once: {text}")
            raise
        except Exception as error:
            if not is_oom(error):
                raise
            raise functions.too_big(
                text, "three samples, the fewest that micro-batches are tried on, do"
            ) from error
        return self._sizes.oom(functions, self.steps, data, rows, each, size)

    def _done(self, rows: int, each: float, size: int) -> None:
        before = len(self.sizes)
        self._sizes.done(self.steps, rows, each, size)
        self.steps += 1
        self._log.step(self.steps, self.sizes[before:])
        if self._careful:
            self._careful -= 1

    def _tell(self, rows: int, size: int, smaller: int, text: str) -> None:
        self.retries += 1
        self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller, error=text)
        self._say(
            f"out of memory at step {self.steps} with {size} of {rows} samples at once: "
            f"the step is repeated with {smaller} at once (the batch stays {rows})"
        )


def _measure(data: Any) -> tuple[int, float]:
    """Samples, and array elements per sample."""
    shapes = [leaf.shape for leaf in keras.tree.flatten(data) if getattr(leaf, "shape", None) is not None]
    lengths = {shape[0] for shape in shapes if len(shape)}
    if len(lengths) != 1:
        raise BadBatch(
            "the parts of the batch have different numbers of samples",
            received=", ".join(str(tuple(shape)) for shape in shapes) or "no arrays",
            expected="the same first dimension in x, y and sample_weight",
        )
    rows = int(lengths.pop())
    if rows == 0:
        raise BadBatch("the batch is empty", received="0 samples", expected="at least one")
    return rows, max(1.0, sum(prod(shape) for shape in shapes) / rows)


def _first_line(error: BaseException) -> str:
    """The line that says it: TensorFlow puts "Graph execution error:" and a stack before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "OOM" in line or "memory" in line), lines[0])[:300]
