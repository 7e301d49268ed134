"""Traces one training step of Keras on TensorFlow, and applies remedies to a model as a user would; in a child process.

`train_step` is turned into a graph with a fixed batch, so that every shape is known; what is alive at once follows from
the order in which operations run. TensorFlow runs them as their inputs arrive, on several threads, so no single order
is the true one: the trace follows the data-flow order, and the peak in the order of the graph is kept with it.
"""

from __future__ import annotations

import os
import re
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from buoy._compat.keras import decide_compilation, layers_of
from buoy.estimate.child import EstimateError, Request, load
from buoy.estimate.devices import by_id
from buoy.estimate.siblings import Sibling, smaller
from buoy.estimate.trace import Trace
from buoy.estimate.tracing.graph import Graph, Node, live_peak, to_trace


def trace_request(request: Request) -> Trace:
    """The trace of one train step of the model the request names."""
    if keras.backend.backend() != "tensorflow":
        raise EstimateError(
            "Keras models are traced on TensorFlow only",
            received=f"the backend {keras.backend.backend()}",
            expected="KERAS_BACKEND=tensorflow",
            hint="on the torch backend, give buoy the training step as a torch build function",
        )
    if request.autocast:
        keras.mixed_precision.set_global_policy(
            "mixed_float16" if request.autocast == "fp16" else "mixed_bfloat16"
        )
    automatic = _asks_for_compilation()
    model, batch, notes = _built(request)
    on_gpu = bool(by_id(request.device).capability)
    model, batch, said = made_smaller(request.source.get("smaller"), model, batch)
    trace = trace_model(model, batch, [*notes, *said])
    trace.facts["code"] = _code_of(batch, said)
    if model.jit_compile or (on_gpu and model in automatic and _can_be_compiled(model)):
        trace.facts["engine"] = "graph" if on_gpu else "xla"
        trace.notes.append(
            "XLA compiles this step and plans its own buffers: estimated as TensorFlow runs it uncompiled"
            + ("" if model.jit_compile else " (Keras compiles on a GPU unless `jit_compile=False`)")
        )
    return trace


def trace_model(model: Any, batch: Any, notes: list[str]) -> Trace:
    """Trace `model.train_step` with this batch; the model is compiled and built."""
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), batch)
    model.optimizer.build(model.trainable_variables)
    graph = tf.function(model.train_step).get_concrete_function(specs).graph
    return trace_step(graph, model.variables, _optimizers(model, graph), batch, notes)


def _optimizers(model: Any, graph: Any) -> list[Any]:
    """Those that the step uses: a `train_step` of its own (a GAN's) has others than the one Keras makes."""
    used = {id(variable) for variable in graph.variables}
    attributes = {id(value): value for value in (model.optimizer, *vars(model).values())}
    return [
        optimizer
        for optimizer in attributes.values()
        if hasattr(optimizer, "apply_gradients")
        and any(id(_array(variable)) in used for variable in optimizer.variables)
    ] or [model.optimizer]


def trace_step(function: Any, variables: Any, optimizers: Any, batch: Any, notes: list[str]) -> Trace:
    """The trace of a step that TensorFlow has made into a graph, whoever wrote it."""
    graph = _graph(function)
    operations = len(graph.nodes)
    ends = [*function.control_outputs, *(tensor.op for tensor in function.outputs)]
    graph = graph.needed([operation.name for operation in ends])
    loops = [node.name for node in graph.nodes if node.kind in ("While", "StatelessWhile")]
    if loops:
        raise EstimateError(
            "the step contains a loop, and what a loop keeps for backward cannot be read from the graph",
            received=f"{loops[0].rpartition('/')[0] or loops[0]} (recurrent layers run as loops on a CPU)",
            expected="layers without a loop",
            hint="`unroll=True` on recurrent layers makes the step a plain graph",
        )
    if graph.unknown:
        notes = [*notes, f"{graph.unknown} tensors have no fixed size and were left out"]
    held = [_array(variable) for variable in variables]
    weights = [_bytes(array) for array in held]
    state = [_bytes(_array(variable)) for optimizer in optimizers for variable in optimizer.variables]
    trace = to_trace(graph, weights, state)
    trace.notes = notes
    leaves = tf.nest.flatten(batch)
    trace.facts |= {
        "engine": "graph",
        "operations": operations,
        "batch": int(leaves[0].shape[0]) if leaves and leaves[0].shape.rank else None,
        "batch_bytes": sum(_bytes(leaf) or 0 for leaf in leaves),
        "parameters": sum(int(array.shape.num_elements()) for array in held if array.shape.rank),
        "optimizer": type(optimizers[0]).__name__,
        "peak_in_graph_order": live_peak(graph, graph.creation_order()) + sum(weights) + sum(state),
        "tensorflow": tf.__version__,
    }
    return trace


def _loaded(path: str) -> Any:
    try:
        return keras.models.load_model(path, compile=True)
    except (TypeError, ValueError) as error:
        missing = re.search(r"Could not (?:locate|deserialize) (?:class|function) '(\w+)'", str(error))
        if missing is None:
            raise
        raise EstimateError(
            "the saved model has a layer whose class is not known here",
            received=f"`{missing[1]}` in {path}",
            expected="layers of Keras, or the code that defines them",
            hint=f"plan from a function that imports {missing[1]}: `def build(): return "
            f"keras.models.load_model({os.path.basename(path)!r}), batch`, and `buoy plan train.py:build`",
        ) from None


def _zeros(model: Any, parts: Any, size: int) -> Any:
    """A batch for a saved model: like the user's own where it is known, else by its input, output and loss."""
    if parts is None:
        inputs = model.input_shape if not isinstance(model.input_shape, list) else model.input_shape[0]
        outputs, labels = model.output_shape[1:], "float32"
        loss = getattr(model, "loss", None)
        if "sparse" in (loss if isinstance(loss, str) else str(getattr(loss, "name", ""))).lower():
            outputs, labels = outputs[:-1], "int32"  # class numbers
        parts = [(inputs[1:], "float32"), (outputs, labels)]
    return tuple(np.zeros((size, *(dimension or 128 for dimension in shape)), kind) for shape, kind in parts)


def _asks_for_compilation() -> weakref.WeakSet[Any]:
    """The models built from here on with `jit_compile="auto"`, which Keras answers by the devices it sees."""
    automatic: weakref.WeakSet[Any] = weakref.WeakSet()

    def resolve(model: Any) -> bool:
        automatic.add(model)
        return False

    decide_compilation(keras, resolve)  # an older Keras decides inside `compile`
    return automatic


def _can_be_compiled(model: Any) -> bool:
    return all(getattr(layer, "supports_jit", True) for layer in layers_of(model))


def _built(request: Request) -> tuple[Any, Any, list[str]]:
    notes: list[str] = []
    given: Any
    if "keras" in request.source:
        model = _loaded(request.source["keras"])
        given = (model, _zeros(model, request.source.get("parts"), request.batch or 32))
    else:
        path, _, name = str(request.source["build"]).rpartition(":")
        given = load(path, name)()
    if isinstance(given, dict):
        given = tuple(given[key] for key in ("model", "batch", "optimizer", "loss") if key in given)
    if not isinstance(given, (tuple, list)) or len(given) < 2 or not isinstance(given[0], keras.Model):
        raise EstimateError(
            "the build function did not return a Keras model and a batch",
            received=type(given).__name__,
            expected="a compiled model and a batch: `return model, (images, labels)`",
        )
    model = given[0]
    batch = tf.nest.map_structure(tf.convert_to_tensor, given[1])
    if request.batch is not None:
        batch = tf.nest.map_structure(
            lambda leaf: tf.zeros((request.batch, *leaf.shape[1:]), leaf.dtype), batch
        )
    if not model.built:
        model(tf.nest.flatten(batch)[0][:1])
    if request.optimizer or not model.compiled:
        if not model.compiled and len(given) < 4:
            notes.append("the model was not compiled: Adam and mean squared error assumed")
        optimizer = request.optimizer or (given[2] if len(given) > 2 else "adam")
        model.compile(
            optimizer=optimizer, loss=given[3] if len(given) > 3 else getattr(model, "loss", None) or "mse"
        )
    return model, batch, notes


def _graph(function: Any) -> Graph:
    """TensorFlow's graph in our own words."""
    nodes = []
    unknown = 0
    for operation in function.get_operations():
        sizes = []
        for tensor in operation.outputs:
            size = _bytes(tensor)
            unknown += size is None
            sizes.append(size or 0)
        nodes.append(
            Node(
                name=operation.name,
                kind=operation.type,
                inputs=[tensor.name for tensor in operation.inputs],
                after=[before.name for before in operation.control_inputs],
                outputs=[tensor.name for tensor in operation.outputs],
                sizes=sizes,
            )
        )
    return Graph(nodes, unknown)


def _array(variable: Any) -> Any:
    """TensorFlow's variable behind a Keras one."""
    return variable if callable(variable.value) else variable.value


def _bytes(tensor: Any) -> Any:
    """Bytes of a tensor or variable; None when its size is not known, 0 for what holds no numbers itself."""
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    if tensor.shape.rank is None or any(dimension is None for dimension in tensor.shape):
        return None
    return int(tensor.shape.num_elements()) * tensor.dtype.size


def made_smaller(name: Any, model: Any, batch: Any) -> tuple[Any, Any, list[str]]:
    """The model and batch with a smaller "model" or "input", and what is to be said of it."""
    if name == "input":
        return *smaller_input(model, batch), []
    if name == "model":
        made, sibling = smaller_model(model)
        return made, batch, [f"{sibling} instead"]
    return model, batch, []


def _code_of(batch: Any, said: list[str]) -> dict[str, str]:
    """What a user writes to have them: for the smaller batch, or the sibling that `made_smaller` named."""
    shape = tuple(tf.nest.flatten(batch)[0].shape[1:])
    cut = f"tokens = tokens[:, :{shape[0]}]" if shape else ""
    if len(shape) == 3:
        cut = (
            f"images = keras.ops.image.resize(images, {shape[:2]})   # and keras.Input({shape}) in the model"
        )
    found = {"smaller-input": cut}
    if said:
        name = said[0].split()[0]
        made = f"keras.applications.{name}(weights=None, include_top=False, input_shape={shape})"
        found["smaller-model"] = f"base = {made}   # your own layers follow"
    return found


def smaller_model(model: Any) -> tuple[Any, str]:
    """The model with its keras.applications part replaced by the next smaller sibling, and that sibling's name."""
    sibling = smaller("keras", model.name)
    made = _whole(model, sibling) if sibling is not None else None
    for layer in model.layers:
        inner = smaller("keras", layer.name) if made is None else None
        if inner is not None:
            sibling, made = inner, _with_part(model, layer, inner)
    if sibling is None or made is None:
        raise EstimateError("no smaller sibling is known")
    made.compile_from_config(model.get_compile_config())
    return made, sibling.name


def smaller_input(model: Any, batch: Any) -> tuple[Any, Any]:
    """The model rebuilt for inputs of half the side or length, and such a batch."""
    sides: dict[int, int] = {}

    def halved(shape: Any, tokens: bool = False) -> list[Any]:
        first = 2 if len(shape) > 3 and keras.config.image_data_format() == "channels_first" else 1
        last = first + max(len(shape) - 2, 1 if tokens else 0)
        made = [
            max(1, side // 2) if side and first <= axis < last else side for axis, side in enumerate(shape)
        ]
        sides.update({side: half for side, half in zip(shape, made, strict=True) if half != side})
        return made

    def rebuilt(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("class_name") == "InputLayer":
                config = value["config"]
                tokens = "int" in str(config.get("dtype"))
                return {**value, "config": {**config, "batch_shape": halved(config["batch_shape"], tokens)}}
            # What a layer was built with follows from its input.
            return {name: rebuilt(part) for name, part in value.items() if name != "build_config"}
        return type(value)(map(rebuilt, value)) if isinstance(value, (list, tuple)) else value

    kinds = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    try:
        config = rebuilt(keras.saving.serialize_keras_object(model))
        if not sides:
            raise EstimateError("the inputs have no side or length")
        made = keras.saving.deserialize_keras_object(config, custom_objects=kinds)
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise EstimateError("the model cannot be built for smaller inputs", received=str(error)) from None
    if not made.compiled:
        made.compile_from_config(model.get_compile_config())

    def cut(leaf: Any) -> Any:
        shape = [leaf.shape[0], *(sides.get(side, side) for side in leaf.shape[1:])]
        return tf.zeros(shape, leaf.dtype) if shape != list(leaf.shape) else leaf

    return made, tf.nest.map_structure(cut, batch)


def _whole(model: Any, sibling: Sibling) -> Any:
    if len(model.output_shape) != 2:
        return _application(sibling, model.input_shape, include_top=False)
    return _application(sibling, model.input_shape, classes=model.output_shape[-1])


def _with_part(model: Any, base: Any, sibling: Sibling) -> Any:
    """The same layers around the smaller part."""
    pooling = "avg" if len(base.output_shape) == 2 else None

    def cloned(layer: Any) -> Any:
        if layer is not base:
            return layer.__class__.from_config(layer.get_config())
        made = _application(sibling, base.input_shape, include_top=False, pooling=pooling)
        made.trainable = base.trainable
        return made

    return keras.models.clone_model(model, clone_function=cloned)


def _application(sibling: Sibling, shape: Any, **options: Any) -> Any:
    try:
        return getattr(keras.applications, sibling.name)(weights=None, input_shape=shape[1:], **options)
    except (ValueError, TypeError) as error:
        raise EstimateError(f"{sibling.name} cannot take the model's place", received=str(error)) from None
