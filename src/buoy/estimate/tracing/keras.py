"""The child process that traces Keras on TensorFlow: `python -m buoy.estimate.tracing.keras RESULT MEMORY`.

`train_step` is turned into a graph with a fixed batch, so that every shape is known; what is alive at once follows from
the order in which operations run. TensorFlow runs them as their inputs arrive, on several threads, so no single order
is the true one: the trace follows the data-flow order, and the peak in the order of the graph is kept beside it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import weakref
from typing import Any

from buoy._compat.keras import decide_compilation, layers_of
from buoy.estimate.child import EstimateError, Request, confine, refuse
from buoy.estimate.devices import by_id
from buoy.estimate.trace import Trace
from buoy.estimate.tracing.graph import Graph, Node, live_peak, to_trace
from buoy.estimate.tracing.torch import explain

os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def main() -> None:
    """Read the request, trace, leave the result or the reason."""
    result, memory = sys.argv[1], int(sys.argv[2])
    request = Request.from_json(sys.stdin.read())
    confine(memory)
    try:
        trace_request(request).save(result)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent learns it from here
        refuse(result, explain(error, request))
        raise SystemExit(3) from None


def trace_request(request: Request) -> Trace:
    """The trace of one train step of the model the request names."""
    import keras

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
    remedies = importlib.import_module("buoy.keras.plan.remedies")
    model, batch, said = remedies.apply(request.source.get("smaller"), model, batch)
    trace = trace_model(model, batch, [*notes, *said])
    trace.facts["code"] = remedies.code_of(batch, said)
    if model.jit_compile or (on_gpu and model in automatic and _can_be_compiled(model)):
        trace.facts["engine"] = "graph" if on_gpu else "xla"
        trace.notes.append(
            "XLA compiles this step and plans its own buffers: estimated as TensorFlow runs it uncompiled"
            + ("" if model.jit_compile else " (Keras compiles on a GPU unless `jit_compile=False`)")
        )
    return trace


def trace_model(model: Any, batch: Any, notes: list[str]) -> Trace:
    """Trace `model.train_step` with this batch; the model is compiled and built."""
    import tensorflow as tf

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


def trace_step(
    function: Any, variables: Any, optimizers: Any, batch: Any, notes: list[str], *, op_by_op: bool = False
) -> Trace:
    """The trace of a step that TensorFlow has made into a graph, whoever wrote it.

    `op_by_op` is for a step that runs without a graph: its tape keeps all of the forward pass to the end.
    """
    import tensorflow as tf

    graph = _graph(function)
    operations = len(graph.nodes)
    if op_by_op:
        graph = _kept_by_tape(graph)
    else:
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
    import keras

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
    """A batch for a saved model: like the person's own where it is known, else by its input, output and loss."""
    import numpy as np

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
    import keras

    automatic: weakref.WeakSet[Any] = weakref.WeakSet()

    def resolve(model: Any) -> bool:
        automatic.add(model)
        return False

    decide_compilation(keras, resolve)  # an older Keras decides inside `compile`
    return automatic


def _can_be_compiled(model: Any) -> bool:
    return all(getattr(layer, "supports_jit", True) for layer in layers_of(model))


def _built(request: Request) -> tuple[Any, Any, list[str]]:
    import keras
    import tensorflow as tf

    notes: list[str] = []
    given: Any
    if "keras" in request.source:
        model = _loaded(request.source["keras"])
        given = (model, _zeros(model, request.source.get("parts"), request.batch or 32))
    else:
        from buoy.estimate.tracing.build import load

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


def _kept_by_tape(graph: Graph) -> Graph:
    backward = [node.name for node in graph.nodes if node.name.startswith("gradient_tape")]
    last = max((i for i, node in enumerate(graph.nodes) if node.name in set(backward)), default=-1)
    forward = [
        name
        for node in graph.nodes[:last]
        if not node.name.startswith("gradient_tape")
        for name in node.outputs
    ]
    tape = Node("tape", "NoOp", forward, backward, [], [])
    return Graph([*graph.nodes[: last + 1], tape, *graph.nodes[last + 1 :]], graph.unknown)


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


if __name__ == "__main__":
    main()
