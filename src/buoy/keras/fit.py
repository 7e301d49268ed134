"""How `model.fit` learns to hand over to a guard among its callbacks.

What `fit` was given, as a guard needs it: data, callbacks, and the step of the model.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import keras

from buoy._compat.keras import replace_fit, split_off_validation, why_not
from buoy._compat.tensorflow import is_pipeline
from buoy.errors import BuoyError, UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.keras.data.epochs import Validation
from buoy.keras.data.loader import BITWISE, Exactness, Feed, Say, feed_for
from buoy.keras.data.pipeline import examine
from buoy.keras.data.pydataset import NumberedValidation
from buoy.keras.state import callbacks as memory


def teach_fit(guard: Any) -> str | None:
    """Let `model.fit` hand over to a guard among its callbacks; once per process, nothing else changes.

    Why that cannot be, in words, where this Keras is not one that buoy knows: `fit` then trains without a guard.
    """
    if (why := why_not("resume")) is not None:
        return why

    def made_of(original: Any) -> Any:
        signature = inspect.signature(original)

        def fit(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # Keras says better what is wrong
            bound.apply_defaults()
            guards = [each for each in flat(bound.arguments.get("callbacks")) if isinstance(each, guard)]
            if len(guards) > 1:
                raise UsageError("one training has one guard", received=f"{len(guards)} in `callbacks`")
            try:
                if not guards or not bound.arguments["self"].compiled:
                    return original(*args, **kwargs)
                return guards[0].run_fit(original, dict(bound.arguments))
            except BaseException as error:
                leave_out_ours(error)
                raise

        return fit

    replace_fit(made_of)
    return None


def flat(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` was given, in whatever form."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks))


def feed_of(arguments: dict[str, Any], seed: int, say: Say) -> Feed:
    """The data as a feed. A validation split is made here, as Keras would: afterwards the arrays are out of sight."""
    x, y, sample_weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    if arguments["validation_split"] and arguments["validation_data"] is None:
        (x, y, sample_weight), arguments["validation_data"] = split_off_validation(
            (x, y, sample_weight), arguments["validation_split"]
        )
        arguments["validation_split"] = 0.0
    names = ("batch_size", "steps_per_epoch", "shuffle", "class_weight")
    return feed_for(x, y, sample_weight, seed, say, **{name: arguments[name] for name in names})


def validation_of(arguments: dict[str, Any], seed: int, say: Say) -> Validation | NumberedValidation | None:
    """What remembers where the evaluations are; None: arrays, which are the same each time, or nothing."""
    data = arguments["validation_data"]
    if isinstance(data, keras.utils.PyDataset):
        validation = NumberedValidation(data, seed, say)
        arguments["validation_data"] = validation.dataset
        _tell(validation.dataset.exactness, say)
        return validation
    if isinstance(data, types.GeneratorType):
        # Each evaluation reads it anew from wherever the threads of the one before had got to.
        say(
            "a resume will not validate bit for bit: Keras reads a generator in validation_data ahead, as far as time "
            "allows, and loses that; hint: validate on arrays, a tf.data.Dataset or a keras.utils.PyDataset"
        )
        return None
    if not hasattr(data, "element_spec"):
        return None
    if is_pipeline(data):  # not one that a strategy has distributed already
        _tell(examine(data), say)
    return Validation(data)


def _tell(found: Exactness, say: Say) -> None:
    if found.grade != BITWISE:
        reason = found.reason.partition(": ")[0]  # what follows is what a training makes of it
        say(f"a resume will not validate bit for bit: {reason}; hint: {found.hint}")


def callbacks_beside(guard: Any, arguments: dict[str, Any]) -> list[Any]:
    """Everybody but the guard, with a History among them: at the guard's turn all of them have done what they do."""
    others = [each for each in flat(arguments["callbacks"]) if each is not guard]
    memory.refuse_rivals(others)
    if not any(isinstance(each, keras.callbacks.History) for each in others):
        others.append(keras.callbacks.History())
    return others


def install_transaction(model: Any, options: dict[str, Any], event: Any, say: Say) -> Any:
    """The two-phase step with micro-batches; a model that it does not fit trains as ever, and is told why."""
    from buoy.keras.step import transaction

    try:
        return transaction.install(model, say=say, event=event, **options)
    except BuoyError as error:
        if options["micro_batch"] is not None:
            raise
        say(f"steps are not split when memory runs out: {error.message}")
        return None


def numbers(logs: dict[str, Any]) -> dict[str, float]:
    """The metrics of an epoch that are single numbers."""
    return {name: float(value) for name, value in logs.items() if getattr(value, "shape", ()) == ()}
