"""What buoy uses of Keras that Keras calls private.

Checked: every name below in Keras 3.8 to 3.15. `why_not` says what keeps a part of buoy
from working with the Keras that is here: that part then steps aside with a message, and the training runs without it.
Three of them are patched in the training process: `Model.fit` and `EpochIterator._enumerate_iterator` (for good, of no
effect without a Guard), and `keras.src.backend.random` (while a comparison of whole and parts runs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

import keras

from buoy._compat import borrowed

__all__ = ["DataAdapter"]

try:
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
except ImportError:  # `why_not("resume")` says so
    data_adapters, DataAdapter = None, object

OLDEST, NEWEST = (3, 8), (3, 15)
"""Minor versions. A newer one of Keras 3 is used as long as all names are there, and a message says so."""

_MODEL = "keras.src.models.model.Model"
_EPOCHS = "keras.src.trainers.epoch_iterator.EpochIterator"
_ADAPTERS = "keras.src.trainers.data_adapters"
_LOSS = "keras.src.trainers.compile_utils.CompileLoss"
NEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "resume": (
        (_MODEL, "fit"),
        (_MODEL, "_flatten_layers"),
        (_MODEL, "_symbolic_build"),
        (_MODEL, "_compile_loss"),
        (_MODEL, "_compile_metrics"),
        (_MODEL, "_get_metrics_result_or_logs"),
        (_EPOCHS, "_enumerate_iterator"),
        (_EPOCHS, "_get_iterator"),
        (_EPOCHS, "_steps_seen"),
        (_ADAPTERS, "get_data_adapter"),
        (f"{_ADAPTERS}.data_adapter", "DataAdapter"),
        (f"{_ADAPTERS}.array_slicing", "train_validation_split"),
        (f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter", "_inputs"),
        (f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter", "_num_samples"),
        (f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter", "_batch_size"),
        (f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter", "_shuffle"),
        ("keras.src.backend.common.variables.Variable", "_value"),
        ("keras.src.backend.common.global_state", "get_global_attribute"),
    ),
    "micro-batches": (
        (_MODEL, "make_train_function"),
        (_MODEL, "_flatten_layers"),
        (_MODEL, "_symbolic_build"),
        (_MODEL, "_loss_tracker"),
        (_MODEL, "_compile_loss"),
        (_MODEL, "_aggregate_additional_loss"),
        (_MODEL, "_call_has_training_arg"),
        (_MODEL, "_compute_loss"),
        (_LOSS, "_flat_losses"),
        ("keras.src.backend.common.variables.Variable", "_value"),
        *(("keras.src.backend.random", name) for name in ("uniform", "randint", "normal", "dropout", "shuffle")),
    ),
}  # fmt: skip
"""What each part of buoy cannot do without: (where, name)."""


def why_not(part: str) -> str | None:
    """Why this part of buoy cannot be used with the Keras that is here; None where it can.

    >>> why_not("resume")
    """
    if not OLDEST <= _version() < (4, 0):
        return f"it knows Keras {_dotted(OLDEST)} to {_dotted(NEWEST)}, and this is {keras.__version__}"
    gone = [f"{where}.{name}" for where, name in NEEDS[part] if not _is_there(where, name)]
    return f"Keras {keras.__version__} has no {gone[0]}" if gone else None


def is_newer() -> bool:
    """Whether this Keras came after the newest one that was checked."""
    return _version() > NEWEST


def version_words() -> str:
    """For the message about a newer one."""
    return f"Keras {keras.__version__} is newer than what buoy was tested with ({_dotted(NEWEST)})"


def mask_blur() -> float:
    """Before 3.13 Keras adds an epsilon of 1e-7 to the number of unmasked values that it divides by: once in a whole
    batch, and again in each part of it. Only in float64 does that show."""
    return 1e-6 if _version() < (3, 13) else 0.0


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in keras.__version__.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_there(where: str, name: str) -> bool:
    """Whether a module or class has this; of what instances get it is enough that a method of the class names it."""
    try:
        owner: Any = import_module(where)
    except ImportError:
        module, _, cls = where.rpartition(".")
        try:
            owner = getattr(import_module(module), cls, None)
        except ImportError:
            return False
    if hasattr(owner, name):
        return True
    functions = [each for base in getattr(owner, "__mro__", ()) for each in vars(base).values()]
    return any(isinstance(each, FunctionType) and name in each.__code__.co_names for each in functions)


# -- patches ------------------------------------------------------------------------------------------------------


def replace_fit(made_of: Callable[[Any], Any]) -> None:
    """Have `made_of(Keras's fit)` in place of `Model.fit`; once per process. Lost without it: the Guard.

    In `model.fit(..., callbacks=[Guard(...)])` Python looks `model.fit` up before it makes the guard. So the method
    must stay the object it is: what changes is the function inside the wrapper that Keras puts around it.
    """
    outer = keras.Model.fit
    cell = _cell_of_wrapped(outer)
    original = outer if cell is None else cell.cell_contents
    if getattr(original, "_knows_buoy", False):
        return
    ours = functools.wraps(original)(made_of(original))
    ours._knows_buoy = True  # type: ignore[attr-defined]
    if cell is None:
        keras.Model.fit = ours
    else:
        cell.cell_contents = ours


def _cell_of_wrapped(function: Any) -> Any:
    """Where a decorated function keeps the one it wraps."""
    while hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is inner or getattr(cell.cell_contents, "_knows_buoy", False):
                return cell
        function = inner
    return None


def walk_epochs_by(walk: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> None:
    """Have `walk(epochs, Keras's own walk)` in place of each walk through an epoch; once per process.

    Lost without it: data that begins in the middle of an epoch, and a place between two steps to save at.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    original = EpochIterator._enumerate_iterator
    if getattr(original, "_knows_buoy", False):
        return

    @functools.wraps(original)
    def walked(self: Any) -> Iterator[Any]:
        return walk(self, original(self))

    walked._knows_buoy = True  # type: ignore[attr-defined]
    EpochIterator._enumerate_iterator = walked


def random_functions() -> Any:
    """The module through which all of Keras draws. Lost without it: micro-batches of models that draw."""
    from keras.src.backend import random

    return random


@contextmanager
def metrics_without_a_step(model: Any) -> Iterator[None]:
    """An epoch resumed after its last batch makes no step, and Keras takes its metrics from the last step."""
    original = model._get_metrics_result_or_logs

    def metrics_or_logs(logs: Any) -> Any:
        return original(logs or model.get_metrics_result())

    own = vars(model)  # not an attribute that Keras should track
    own["_get_metrics_result_or_logs"] = metrics_or_logs
    try:
        yield
    finally:
        own.pop("_get_metrics_result_or_logs", None)


# -- data ---------------------------------------------------------------------------------------------------------


def adapter_of(**given: Any) -> Any:
    """Keras's adapter for the data that `fit` was given."""
    return data_adapters.get_data_adapter(**given)


def pydataset_adapter(dataset: Any, class_weight: Any) -> Any:
    """Keras's adapter for a PyDataset, in the dataset's own order."""
    return data_adapters.PyDatasetAdapter(dataset, class_weight=class_weight, shuffle=False)


def is_torch_loader(x: Any) -> bool:
    """Whether this is a DataLoader."""
    return bool(data_adapters.is_torch_dataloader(x))


def is_adapter_or_grain(x: Any) -> bool:
    """Whether this is an adapter itself, or a dataset of grain, which Keras takes since 3.11."""
    is_grain = getattr(data_adapters, "is_grain_dataset", lambda _: False)
    return isinstance(x, DataAdapter) or bool(is_grain(x))


def split_off_validation(arrays: Any, share: float) -> Any:
    """((x, y, weight) to train on, (x, y, weight) to validate on), as `validation_split` has it."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=share)


def arrays_in(adapter: Any) -> tuple[Any, int, int, Any]:
    """(arrays, samples, batch size, shuffle) of Keras's adapter for arrays."""
    return adapter._inputs, adapter._num_samples, adapter._batch_size, adapter._shuffle


def sliceable(arrays: Any) -> Any:
    """The arrays as tensors that can be gathered from inside a graph."""
    from keras.src.trainers.data_adapters import array_slicing

    return keras.tree.lists_to_tuples(array_slicing.convert_to_sliceable(arrays, target_backend="tensorflow"))


def gathered_sparse(part: Any, chosen: Any) -> Any:
    """These rows of a sparse array; None: it is none."""
    from keras.src.trainers.data_adapters import array_slicing

    if not isinstance(part, array_slicing.TensorflowSparseWrapper):
        return None
    return array_slicing.slice_tensorflow_sparse_wrapper(part, chosen)


def read_by(adapter: Any, reader: Any) -> None:
    """Let Keras's adapter for a torch loader read this in its place."""
    adapter._dataloader = reader


def dataset_of(adapter: Any) -> Any:
    """The tf.data.Dataset or PyDataset of an adapter; None: it has neither."""
    return getattr(adapter, "_dataset", None) or getattr(adapter, "py_dataset", None)


def forget_batches_ahead(adapter: Any) -> None:
    """Drop what threads have made ahead of a PyDataset's last pass."""
    ahead = getattr(getattr(adapter, "enqueuer", None), "ready_queue", None)
    if ahead is not None:
        ahead.queue.clear()


def source_of(epochs: Any) -> Any:
    """What an EpochIterator iterates: the dataset, distributed where there is a strategy."""
    return type(epochs)._get_iterator(epochs)


def iterate_instead(epochs: Any, source: Any) -> None:
    """Let an EpochIterator iterate this."""
    epochs._get_iterator = lambda: source


def seen_before(epochs: Any, steps: int) -> None:
    """Let an EpochIterator count these steps of its pass as made."""
    epochs._steps_seen = steps


# -- models -------------------------------------------------------------------------------------------------------


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """The model and every layer in it, each once."""
    return list(model._flatten_layers(include_self=include_self))


def layers_in(value: Any) -> list[Any]:
    """Of a layer itself and all in it; nothing of anything else."""
    return list(getattr(value, "_flatten_layers", list)())


def build_on_symbols(model: Any, batch: Any) -> None:
    """Make every variable of a compiled model from the shapes of a batch, with nothing computed."""
    model._symbolic_build(data_batch=batch)


def raw(variable: Any) -> Any:
    """TensorFlow's variable behind a Keras variable; anything else as it is. `variable.value` is another one in a
    scope that holds writes back, and a tensor under autocast."""
    return getattr(variable, "_value", variable)


def optimizer_weights(optimizer: Any) -> list[Any]:
    """The variables that an optimizer trains; none before it is built."""
    found: list[Any] = borrowed(
        optimizer, "_trainable_variables", [], "weights that only an optimizer knows are not seen"
    )
    return list(found)


def can_decide_compilation(keras: Any) -> bool:
    """Whether `compile(jit_compile="auto")` is decided in a method that can be replaced (not in an older Keras)."""
    return hasattr(keras.Model, "_resolve_auto_jit_compile")


def decide_compilation(keras: Any, decide: Any) -> None:
    """Put `decide(model)` in the place of Keras's own decision, in a child that a plan starts."""
    if can_decide_compilation(keras):
        keras.Model._resolve_auto_jit_compile = decide


def loss_of(model: Any) -> Any:
    """What `compile` made of the losses; None: none was given."""
    return model._compile_loss


def metrics_of(model: Any) -> Any:
    """What `compile` made of the metrics; None: none were given."""
    return model._compile_metrics


def loss_tracker_of(model: Any) -> Any:
    """The mean loss of this epoch. Lost without it: a NaN loss is not told from others at a save."""
    return getattr(model, "_loss_tracker", None)


@contextmanager
def losses_replaced(compiled: Any, by: Callable[[int, Any], Any]) -> Iterator[None]:
    """Within it each single loss of a compiled one is `by(its number, the loss)`."""
    entries = compiled._flat_losses
    compiled._flat_losses = [each._replace(loss=by(number, each.loss)) for number, each in enumerate(entries)]
    try:
        yield
    finally:
        compiled._flat_losses = entries


def added_loss(model: Any, loss: Any) -> Any:
    """What a loss that a layer added counts in the total."""
    return model._aggregate_additional_loss(loss)


def call_in_training(model: Any, inputs: Any) -> Any:
    """The model's outputs as Keras's own training step computes them."""
    return model(inputs, training=True) if model._call_has_training_arg else model(inputs)


def whole_loss(model: Any, x: Any, y: Any, outputs: Any, sample_weight: Any) -> Any:
    """The loss as Keras's own training step computes it, with a `compute_loss` of the user's own."""
    return model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def mask_of(tensor: Any) -> Any:
    """The mask that layers have attached to a tensor; None: none."""
    return getattr(tensor, "_keras_mask", None)


def attach_mask(tensor: Any, mask: Any) -> None:
    """Attach a mask to a tensor, as layers do."""
    tensor._keras_mask = mask


def global_seeds(*, make: bool = False) -> Any:
    """Keras's own seed generator; None where nothing has drawn from it. Lost without it: it starts over at a resume."""
    from keras.src.backend.common import global_state

    if make:
        from keras.src.random.seed_generator import global_seed_generator

        return global_seed_generator()
    return global_state.get_global_attribute("global_seed_generator")


def places_in_weights_file(model: Any) -> dict[str, Any]:
    """Where Keras would put each variable in a `.weights.h5`. Lost without it: `buoy ckpt export` to that format."""
    from keras.src.saving import saving_lib

    class Layout(saving_lib.H5IOStore):  # type: ignore[misc]
        """A store for Keras's own saver that writes nothing and notes which variable goes where."""

        def __init__(self) -> None:
            self.places: dict[str, Any] = {}
            self._group = ""

        def __bool__(self) -> bool:
            return True

        def make(self, path: str, metadata: Any = None) -> Any:
            self._group = f"{path}/vars" if path else "vars"
            return self

        def __setitem__(self, key: str, value: Any) -> None:
            self.places[f"{self._group}/{key}"] = value

        def __del__(self) -> None:
            """Nothing is open."""

    layout = Layout()
    saving_lib._save_state(model, layout, None, "", set())
    return layout.places


def functions_in(step: Any) -> list[Any]:
    """The `tf.function`s of a model's training function. Lost without them: the warning that a step draws from
    generators of TensorFlow that no checkpoint can hold."""
    cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    inner = [getattr(each, "__wrapped__", None) for each in cells]
    return [each for each in (step, *cells, *inner) if hasattr(each, "get_concrete_function")]


# -- callbacks ----------------------------------------------------------------------------------------------------

BASE_ATTRIBUTES = ("model", "_model", "params", "validation_data")
"""Of every callback: what Keras tells it."""
MOVING = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen",
    ),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "CSVLogger": ("keys",),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "History": ("history", "epoch"),
}  # fmt: skip
"""What moves while Keras's own callbacks work. Lost without one: that callback starts over in this at a resume."""


def callbacks_catch_up(callbacks: Any) -> None:
    """Wait for the callbacks that Keras runs beside the training."""
    if getattr(callbacks, "_async_train", False):
        for name in ("_flush_futures", "_clear_futures"):  # the second is what Keras 3.8 calls it
            getattr(callbacks, name, lambda: None)()
