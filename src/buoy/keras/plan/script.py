"""An unmodified Keras script, run up to its first training step: the step it was about to make, to be traced.

Runs in a child process. `fit` and `train_on_batch` are left as soon as their first batch is known; a `tf.function` of
the script's own is left when its optimizer is about to change the weights. A loop without one is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import adapter_of, build_on_symbols, layers_of
from buoy._compat.tensorflow import with_its_autograph
from buoy.estimate.child import WRITE_BUILD, EstimateError, Request, in_time
from buoy.estimate.trace import Trace
from buoy.estimate.tracing.keras import made_smaller, trace_model, trace_step

_Function: Any = type(tf.function(lambda: None))
_found: _Step | None = None


class _Reached(BaseException):
    """The first step; not an Exception, so that the script's own handlers let it pass."""


@dataclass(slots=True)
class _Step:
    """What the script was about to do: its model, or its function, says how to trace it."""

    batch: Any = None
    model: Any = None
    function: Any = None
    arguments: tuple[Any, dict[str, Any]] = ((), {})
    optimizer: Any = None


def run(path: str, arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run the script; returns `{"accumulate", "autocast"}`, raises EstimateError where no step came."""
    global _found
    if keras.backend.backend() != "tensorflow":
        raise EstimateError(
            "Keras scripts are traced on TensorFlow only", received=f"the backend {keras.backend.backend()}",
            expected="KERAS_BACKEND=tensorflow",
        )  # fmt: skip
    script = _Script()
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    try:
        with script, in_time(timeout, "training step"):
            runpy.run_path(path, run_name="__main__")
    except _Reached:
        _found = script.step
        if _found.model is None and _found.function is None:
            raise EstimateError(
                "the script's training step runs operation by operation",
                received="an optimizer's `apply_gradients` outside of any `tf.function`",
                expected="a training step in a `tf.function`, or `model.fit`",
                hint=f"put `@tf.function` on the step (it takes less memory and time), or {WRITE_BUILD}",
            ) from None
        return {"accumulate": 1, "autocast": None}
    except SystemExit as error:
        raise EstimateError(
            "the script ended before its first training step", received=f"exit code {error.code}",
            expected="a training", hint="pass its arguments after `--`: `buoy plan train.py -- --data d`",
        ) from None  # fmt: skip
    raise EstimateError(
        "the script ended without a training step",
        received="no `model.fit`, `train_on_batch` or `optimizer.apply_gradients`",
        expected="a Keras training",
        hint=WRITE_BUILD,
    )


def trace(request: Request) -> Trace:
    """The trace of the step that the script was about to make, with the wanted number of samples."""
    assert _found is not None, "run a script first"
    step = _found
    if request.optimizer is not None:
        raise EstimateError("the optimizer of a script is its own", expected="a build function to change it")
    if step.model is not None:
        batch = _sized(step.batch, request.batch)
        return trace_model(*made_smaller(request.source.get("smaller"), step.model, batch))
    if request.source.get("smaller"):
        raise EstimateError("no smaller sibling is known")
    args, kwargs = _sized(step.arguments, request.batch)
    # The script's own function was left half made.
    graph = with_its_autograph(step.function).get_concrete_function(*args, **kwargs).graph
    owned = {id(getattr(variable, "value", variable)) for variable in step.optimizer.variables}
    variables = [variable for variable in graph.variables if id(variable) not in owned]
    return trace_step(graph, variables, [step.optimizer], _tensors((args, kwargs)), [])


class _Script:
    """The frameworks' entry points, while the script runs."""

    def __init__(self) -> None:
        self.step = _Step()
        self._calls: list[tuple[Any, Any]] = []
        self._is_taped = False
        """A tape was opened outside of any function: what is applied then is a training step, no making of slots."""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> _Script:
        self._replace(keras.Model, "fit", self._fit)
        self._replace(keras.Model, "train_on_batch", self._train_on_batch)
        self._replace(keras.optimizers.Optimizer, "apply", self._apply)
        self._replace(_Function, "__call__", self._call)
        self._replace(tf.GradientTape, "__enter__", self._tape)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        setattr(owner, name, replaced)
        self._undo.callback(setattr, owner, name, original)

    def _fit(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(model, *args, **kwargs)
        given.apply_defaults()
        wanted = given.arguments
        adapter = adapter_of(
            x=wanted["x"], y=wanted["y"], sample_weight=wanted["sample_weight"], batch_size=wanted["batch_size"],
            steps_per_epoch=wanted["steps_per_epoch"], shuffle=False, class_weight=wanted["class_weight"],
        )  # fmt: skip
        self._leave_for(model, next(iter(adapter.get_tf_dataset())))

    def _train_on_batch(self, original: Any, model: Any, x: Any, y: Any = None, *args: Any, **_: Any) -> Any:
        given = tuple(part for part in (x, y, *args[:1]) if part is not None)
        self._leave_for(model, given)

    def _leave_for(self, model: Any, batch: Any) -> None:
        if not model.compiled:
            raise EstimateError(
                "the model is not compiled", hint="`model.compile(optimizer, loss)` before `fit`"
            )
        self.step = _Step(batch=tf.nest.map_structure(tf.convert_to_tensor, batch), model=model)
        try:
            build_on_symbols(model, self.step.batch)
        except RuntimeError:
            # A model with a `train_step` of its own and no `call` (a GAN, a VAE) cannot be built so, and need not be.
            if not all(layer.built for layer in layers_of(model, include_self=False)):
                raise
        raise _Reached

    def _call(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return original(function, *args, **kwargs)
        self._calls.append((function, (args, kwargs)))
        try:
            return original(function, *args, **kwargs)
        finally:
            self._calls.pop()

    def _tape(self, original: Any, tape: Any) -> Any:
        self._is_taped = self._is_taped or (tf.executing_eagerly() and not self._calls)
        return original(tape)

    def _apply(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._calls:
            original(optimizer, *args, **kwargs)
            function, arguments = self._calls[0]
            self.step = _Step(function=function, arguments=arguments, optimizer=optimizer)
            raise _Reached
        if self._is_taped and tf.executing_eagerly():
            raise _Reached  # without a step to trace
        return original(optimizer, *args, **kwargs)


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(value) if isinstance(leaf, (tf.Tensor, tf.TensorSpec))]


def _size(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in _tensors(batch) if leaf.shape.rank]
    return int(sizes[0]) if sizes else None


def _sized(batch: Any, size: int | None) -> Any:
    """The batch as shapes, with so many samples; what is no part of a batch stays."""
    now = _size(batch)

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        shape = leaf.shape
        if size is not None and shape.rank and shape[0] == now:
            shape = (size, *shape[1:])
        return tf.TensorSpec(shape, leaf.dtype)

    if size is not None and now is None:
        raise EstimateError("the step is given no batch whose size could be changed", received="no tensor")
    return tf.nest.map_structure(spec, batch)
