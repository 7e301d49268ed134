"""When a line runs: before, in or after training. An error after training costs the training."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from buoy.lint.constants import epochs_of, range_length
from buoy.lint.facts import Block, Call, Facts

When = Literal["before", "in", "after"]

# Calls that are one optimisation step, and calls that are a whole training.
_STEPS = ("backward", "apply_gradients", "train_on_batch", "manual_backward")
_TRAININGS = ("fit", "fit_generator", "fit_one_cycle", "fine_tune", "train")
_FIT_WORDS = frozenset(
    {
        "epochs",
        "nb_epoch",
        "steps_per_epoch",
        "validation_data",
        "validation_split",
        "callbacks",
        "batch_size",
    }
)
_FRAMEWORKS = frozenset(
    {
        "torch",
        "tensorflow",
        "keras",
        "tf_keras",
        "lightning",
        "pytorch_lightning",
        "transformers",
        "fastai",
        "accelerate",
    }
)
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a line stands in the life of the training."""

    when: When
    epochs: int | None = None

    @property
    def words(self) -> str:
        """`after 50 epochs of training`, for messages; empty before training."""
        if self.when == "before":
            return ""
        if self.when == "in":
            return "during training"
        return (
            f"after {self.epochs} epochs of training" if self.epochs and self.epochs > 1 else "after training"
        )


@dataclass(slots=True)
class _Event:
    block: Block
    start: int
    end: int
    epochs: int | None


class Timing:
    """The trainings of one document; made once, on first need."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._events: dict[int, list[_Event]] = {}
        if facts.packages & _FRAMEWORKS:
            self._find()

    def moment(self, block: Block, line: int, depth: int = _DEEPEST) -> Moment:
        """When a line of a block runs; `before` when nothing says otherwise."""
        function = block.function()
        found = Moment("before")
        for event in self._events.get(id(function), ()):
            if event.start <= line <= event.end:
                return Moment("in", event.epochs)
            if event.end < line and not _exclusive(event.block, block):
                found = Moment("after", event.epochs or found.epochs)
        if found.when == "after" or function.kind != "function" or depth == 0:
            return found
        sites = self._sites(function)
        moments = [
            self.moment(site.block, site.node.lineno, depth - 1)
            for site in sites
            if site.block.function() is not function
        ]
        if moments and all(moment.when == "after" for moment in moments):
            return moments[0]
        if moments and all(moment.when != "before" for moment in moments):
            return Moment("in", moments[0].epochs)
        return found

    @property
    def trains(self) -> bool:
        """Whether anything here trains at all."""
        return bool(self._events)

    def is_training_loop(self, block: Block) -> bool:
        """Whether this loop holds a training step or is one around it."""
        line = getattr(block.node, "lineno", 0)
        return any(event.start <= line <= event.end for event in self._events.get(id(block.function()), ()))

    def _find(self) -> None:
        """Mark each training, then the calls of functions that train, and so on outwards."""
        facts = self._facts
        seen: set[tuple[str, bool]] = set()
        work: list[tuple[Call, bool, int | None, int]] = []
        for name in _STEPS:
            calls = [call for call in facts.calls.get(name, ()) if call.receiver is not None]
            work += [(call, False, None, _DEEPEST) for call in calls]
        for name in _TRAININGS:
            calls = [call for call in facts.calls.get(name, ()) if self._is_training(call)]
            work += [(call, True, epochs_of(call, facts), _DEEPEST) for call in calls]
        while work:
            call, whole, epochs, depth = work.pop()
            function = call.block.function()
            loops = call.block.loops()
            outermost = loops[-1].node if loops else None
            # A step outside any loop is a function's: its callers hold the loop.
            region = call.statement if whole else outermost
            if region is not None:
                if epochs is None and isinstance(outermost, ast.For):
                    epochs = range_length(outermost.iter, facts, call.block)
                start = getattr(region, "lineno", 0)
                end = getattr(region, "end_lineno", None) or start
                self._events.setdefault(id(function), []).append(_Event(call.block, start, end, epochs))
            key = (function.scope.name, region is not None)
            if function.kind == "function" and depth and key not in seen:
                seen.add(key)
                work += [(site, region is not None, epochs, depth - 1) for site in self._sites(function)]

    def _is_training(self, call: Call) -> bool:
        if call.receiver is None:
            return False
        words = {keyword.arg for keyword in call.node.keywords}
        # `model.train()` of torch only sets a flag; a Trainer's takes the whole training.
        if call.tail == "train":
            name = (call.dotted.rpartition(".")[0]).lower()
            return name.endswith("trainer") and bool(
                self._facts.packages & {"transformers", "trl", "sentence_transformers"}
            )
        if call.tail != "fit":
            return True
        if words & (_FIT_WORDS - {"batch_size"}):
            return True
        dotted = call.dotted.rpartition(".")[0]
        return (
            any(other.dotted.rpartition(".")[0] == dotted for other in self._facts.calls.get("compile", ()))
            or "trainer" in dotted.lower()
        )

    def _sites(self, function: Block) -> list[Call]:
        """Calls of a function by its name; `torch.save(...)` is no call of the file's own `save`."""
        facts = self._facts
        return [
            call
            for call in facts.calls.get(function.scope.name, ())
            if call.dotted.count(".") <= 1
            and ("." not in call.dotted or call.dotted.partition(".")[0] not in facts.imports)
        ]


def _exclusive(first: Block, second: Block) -> bool:
    """Whether two blocks are different branches of the same `if` or `try`: then neither comes after the other."""
    branches = {id(block.node): block.kind for block in first.up() if block.kind in ("if", "else")}
    return any(
        branches.get(id(block.node), block.kind) != block.kind
        for block in second.up()
        if block.kind in ("if", "else")
    )


def timing_of(facts: Facts) -> Timing:
    """The document's timing, made on first need."""
    found = facts.memo.get("timing")
    if not isinstance(found, Timing):
        found = facts.memo["timing"] = Timing(facts)
    return found
