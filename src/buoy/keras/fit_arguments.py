"""What `fit` was given, as a guard needs it: data, callbacks, and the step of the model."""

from __future__ import annotations

import types
from typing import Any

import keras

from buoy.errors import BuoyError
from buoy.keras import callbacks as memory
from buoy.keras.data import BITWISE, Exactness, Feed, Say, feed_for
from buoy.keras.data_numbered import NumberedValidation
from buoy.keras.epochs import Validation
from buoy.keras.fit_hook import flat
from buoy.keras.pipeline_reading import examine


def feed_of(arguments: dict[str, Any], seed: int, say: Say) -> Feed:
    """The data as a feed. A validation split is made here, as Keras would: afterwards the arrays are out of sight."""
    x, y, sample_weight = arguments["x"], arguments["y"], arguments["sample_weight"]
    if arguments["validation_split"] and arguments["validation_data"] is None:
        from keras.src.trainers.data_adapters import array_slicing

        (x, y, sample_weight), arguments["validation_data"] = array_slicing.train_validation_split(
            (x, y, sample_weight), validation_split=arguments["validation_split"]
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
    if hasattr(data, "_inputs"):  # not one that a strategy has distributed already
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
    from buoy.keras import transaction

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
