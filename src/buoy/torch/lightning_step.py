"""Lightning's automatic optimization as a transaction: what a training step returns and logs, over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from importlib import import_module
from typing import Any

import torch

from buoy.torch.metrics import BatchValues, counted, put_back
from buoy.torch.snapshot import Snapshot
from buoy.torch.transaction import Transaction
from buoy.torch.uncut import hint_in_a_trainer, samples_of, split_of

Log = tuple[int, tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, str, type(None))


class Held:
    """What the parts of one try have logged and returned; goes to Lightning when the step is done, as one batch's."""

    def __init__(self, results: Any, module: torch.nn.Module) -> None:
        self.values = BatchValues(module)
        self.counted: dict[str, Any] = {}
        """What was logged in this epoch before a resume, by key, until the key is logged again."""
        self.outputs: list[tuple[int, dict[str, Any]]] = []
        self.size: int | None = None
        """Samples of the part that is computed; None: nothing is, and what is logged goes on at once."""
        self._logs: list[Log] = []
        self._results = results
        self._log: Callable[..., None] = results.log
        results.log = self._route

    def remove(self) -> None:
        """Leave Lightning's collection as it was found."""
        vars(self._results).pop("log", None)

    def clear(self) -> None:
        """A try begins."""
        self._logs.clear()
        self.outputs.clear()
        self.values.clear()

    def hand_over(self) -> dict[str, Any]:
        """The step is done: log it, and return what `training_step` returned beside the loss."""
        self.values.put_in()
        together: dict[tuple[str, str], list[Log]] = {}
        for entry in self._logs:
            together.setdefault((entry[1][0], entry[1][1]), []).append(entry)
        for entries in together.values():
            self._pass_on(*_merged(entries))
        names = self.outputs[-1][1] if self.outputs else {}
        return {name: _joined([(size, made.get(name)) for size, made in self.outputs]) for name in names}

    def _route(self, *args: Any, **kwargs: Any) -> None:
        if self.size is None:
            self._pass_on(args, kwargs)
            return
        fx, name, value, *rest = args
        value = value.detach() if isinstance(value, torch.Tensor) else value
        self._logs.append((self.size, (fx, name, value, *rest), kwargs))

    def _pass_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._log(*args, **kwargs)
        before = self.counted.pop(f"{args[0]}.{args[1]}", None)
        if before is not None:  # the first time has only made its place
            put_back(self._results[f"{args[0]}.{args[1]}"], {"": before})
            self._log(*args, **kwargs)


def _merged(entries: list[Log]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One value for the whole batch, as Lightning would reduce them over batches."""
    _, args, kwargs = entries[-1]
    if len(entries) == 1 or not isinstance(args[2], torch.Tensor):
        return args, kwargs
    sizes, values = [size for size, _, _ in entries], [args[2] for _, args, _ in entries]
    by = kwargs.get("reduce_fx", "mean")
    name = by if isinstance(by, str) else getattr(by, "__name__", "")
    if name in ("mean", "avg"):
        value = sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    elif name == "sum":
        value = sum(values)
    elif name in ("max", "min"):
        value = reduce(torch.maximum if name == "max" else torch.minimum, values)
    else:
        value = values[-1]
    given = [kwargs.get("batch_size") for _, _, kwargs in entries]
    if all(given):
        kwargs = {**kwargs, "batch_size": sum(given)}
    return (*args[:2], value, *args[3:]), kwargs


def _joined(values: list[tuple[int, Any]]) -> Any:
    """Tensors with one row per sample are put together; of anything else the last part's stands."""
    tensors = [
        value for size, value in values if isinstance(value, torch.Tensor) and value.shape[:1] == (size,)
    ]
    return torch.cat(tensors) if len(tensors) == len(values) > 1 else values[-1][1]


class StepTransaction(Transaction):
    """A transaction whose failed tries leave no trace in metrics and logs either."""

    def __init__(self, module: torch.nn.Module, held: Held, **settings: Any) -> None:
        super().__init__(**settings)
        self._before.snapshot = _StepSnapshot(module, held)

    def usable(self, hint: str) -> str:
        """In words of a Trainer."""
        return hint_in_a_trainer(
            hint,
            "smaller batches from the loader, with Trainer(accumulate_grad_batches=...) for as many per step",
        )


class _StepSnapshot(Snapshot):
    """Also counters that the module keeps in plain attributes, and lists to which `training_step` appends."""

    def __init__(self, module: torch.nn.Module, held: Held) -> None:
        super().__init__()
        self._module, self._held = module, held
        self._has_metrics = bool(counted(module))
        self._counted: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        self._lengths: list[tuple[list[Any], int]] = []

    def take(self) -> None:
        super().take()
        self._held.clear()
        own = vars(self._module)
        self._plain = {name: value for name, value in own.items() if type(value) in _PLAIN}
        self._lengths = [(value, len(value)) for value in own.values() if type(value) is list]
        if self._has_metrics:
            self._counted = counted(self._module)

    def restore(self) -> None:
        super().restore()
        if not self.taken:
            return
        vars(self._module).update(self._plain)
        for kept, length in self._lengths:
            del kept[length:]
        if self._has_metrics:
            put_back(self._module, self._counted)


class _Skipped(Exception):  # noqa: N818 - never leaves this module
    """`training_step` returned None: no step for this batch."""


class _Backward:
    """What stands for a gradient scaler: the loss goes through Lightning's own backward, hooks and scaling included."""

    def __init__(self, backward: Callable[[torch.Tensor], None]) -> None:
        self._backward = backward
        self._loss: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> _Backward:
        self._loss = loss
        return self

    def backward(self) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None
        self._backward(loss)


def transactional(
    trainer: Any, library: str, held: Held, backward: Callable[..., torch.Tensor]
) -> Callable[[], None]:
    """Have every step of this trainer computed by `backward`; returns how to undo that."""
    call: Any = import_module(f"{library}.trainer.call")
    result_of: Any = import_module(f"{library}.loops.optimization.automatic").ClosureResult
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    original = loop._make_closure

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = original(kwargs, optimizer, batch_idx)
        if closure._backward_fn is None:
            return closure

        def loss_of(part: Any) -> torch.Tensor:
            held.size = samples_of(part)
            is_part = held.size < samples_of(kwargs["batch"])
            try:
                with held.values.gathering() if is_part else nullcontext():
                    made = call._call_strategy_hook(
                        trainer, "training_step", *{**kwargs, "batch": part}.values()
                    )
            finally:
                size, held.size = held.size, None
            result = result_of.from_training_step_output(made, trainer.accumulate_grad_batches)
            if result.closure_loss is None:
                raise _Skipped
            held.outputs.append((size, result.extra))
            return result.closure_loss  # type: ignore[no-any-return]

        @torch.enable_grad()
        def step(*args: Any, **options: Any) -> Any:
            if closure._zero_grad_fn is not None:
                closure._zero_grad_fn()
            try:
                batch = kwargs["batch"]
                loss = backward(batch, loss_of, split=split_of(batch), scaler=_Backward(closure._backward_fn))
            except _Skipped:
                held.hand_over()
                return result_of(None)
            return result_of(loss, extra=held.hand_over())

        closure.closure = step
        return closure

    loop._make_closure = make_closure

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo
