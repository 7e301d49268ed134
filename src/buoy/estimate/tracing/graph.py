"""What a data-flow graph keeps alive: a walk over nodes in an order, with buffers reused as TensorFlow does."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from buoy.estimate.trace import Event, Trace

# These hand on their input's buffer under another name.
ALIASES = frozenset({
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot",
    "EnsureShape",
})  # fmt: skip
# Their outputs live outside the step, or are shared with what does.
OUTSIDE = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp", "NoOp"})
# These write into an input of the same size that nobody needs any more.
IN_PLACE = frozenset({
    "Relu", "Relu6", "ReluGrad", "Relu6Grad", "Add", "AddV2", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "Neg",
    "Sqrt", "Rsqrt", "Square", "Exp", "Tanh", "TanhGrad", "Sigmoid", "SigmoidGrad", "BiasAdd", "AddN", "Softmax",
    "LogSoftmax", "SelectV2", "Cast", "Erf", "Selu", "SeluGrad", "Elu", "EluGrad", "RsqrtGrad", "SqrtGrad", "Sign",
    "Abs", "Log",
})  # fmt: skip


@dataclass(slots=True)
class Node:
    """One operation: what it reads, what must run before it, what it makes."""

    name: str
    kind: str
    inputs: list[str]
    after: list[str]
    outputs: list[str]
    sizes: list[int]


@dataclass(slots=True)
class Graph:
    """Nodes in the order they were created."""

    nodes: list[Node]
    unknown: int = 0
    _makers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._makers = {name: index for index, node in enumerate(self.nodes) for name in node.outputs}

    def needed(self, wanted: Collection[str]) -> Graph:
        """Without the operations that none of the wanted ones depends on: TensorFlow never runs those."""
        names = {node.name: index for index, node in enumerate(self.nodes)}
        found = {names[name] for name in wanted if name in names}
        open_ends = list(found)
        while open_ends:
            for before in self._before(self.nodes[open_ends.pop()], names) - found:
                found.add(before)
                open_ends.append(before)
        return Graph([self.nodes[index] for index in sorted(found)], self.unknown)

    def creation_order(self) -> list[int]:
        """As the program was written: every update of a variable waits for the whole backward pass."""
        return list(range(len(self.nodes)))

    def data_flow_order(self) -> list[int]:
        """As an executor with one queue runs it: first ready, first run."""
        names = {node.name: index for index, node in enumerate(self.nodes)}
        waiting = []
        followers: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            before = self._before(node, names)
            waiting.append(len(before))
            for earlier in before:
                followers[earlier].append(index)
        ready = deque(index for index, count in enumerate(waiting) if not count)
        order = []
        while ready:
            index = ready.popleft()
            order.append(index)
            for follower in followers[index]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        return order

    def _before(self, node: Node, names: dict[str, int]) -> set[int]:
        made = {self._makers[name] for name in node.inputs if name in self._makers}
        return made | {names[name] for name in node.after if name in names}


def events(graph: Graph, order: Sequence[int]) -> tuple[list[Event], dict[int, list[str]]]:
    """Allocations and frees along an order, and the operations that wrote into each buffer."""
    root: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.outputs:
            aliased = node.kind in ALIASES and node.inputs
            root[name] = root.get(node.inputs[0], node.inputs[0]) if aliased else name
    last: dict[str, int] = {}
    for place, index in enumerate(order):
        for name in (*graph.nodes[index].inputs, *graph.nodes[index].outputs):
            last[root.get(name, name)] = place
    found: list[Event] = []
    made: dict[int, list[str]] = {}
    held: dict[str, tuple[int, int]] = {}
    next_identity = 0
    for place, index in enumerate(order):
        node = graph.nodes[index]
        dying = {
            name
            for name in (root.get(each, each) for each in node.inputs)
            if name in held and last[name] == place
        }
        for name, size in zip(node.outputs, node.sizes, strict=True):
            if root[name] != name or node.kind in OUTSIDE or not size:
                continue
            reused = (
                next((each for each in dying if held[each][1] == size), None)
                if node.kind in IN_PLACE
                else None
            )
            if reused is not None:
                dying.discard(reused)
                held[name] = held.pop(reused)
                made[held[name][0]].append(node.name)
                continue
            held[name] = (next_identity, size)
            made[next_identity] = [node.name]
            found.append(("a", next_identity, size))
            next_identity += 1
        unread = {name for name in node.outputs if name in held and last[name] == place}
        for name in dying | unread:
            found.append(("f", held.pop(name)[0], 0))
    return found, made


def live_peak(graph: Graph, order: Sequence[int]) -> int:
    """The most bytes alive at once along an order."""
    sizes: dict[int, int] = {}
    now = most = 0
    for kind, identity, size in events(graph, order)[0]:
        if kind == "a":
            sizes[identity] = size
            now += size
            most = max(most, now)
        else:
            now -= sizes.pop(identity)
    return most


def to_trace(graph: Graph, weights: Sequence[int], state: Sequence[int]) -> Trace:
    """The trace of one step in data-flow order, after the variables it works on."""
    found, made = events(graph, graph.data_flow_order())
    labels: dict[tuple[str, str, str], int] = {}
    all_events: list[Event] = []
    owner: dict[int, int] = {}
    first = len(weights) + len(state)
    for identity, size in enumerate([*weights, *state]):
        label = ("weights" if identity < len(weights) else "optimizer", "", "variable")
        owner[identity] = labels.setdefault(label, len(labels))
        all_events.append(("a", identity, size))
    backward = _read_by_backward(graph)
    for kind, identity, size in found:
        all_events.append((kind, identity + first, size))
        if kind == "a":
            names = made[identity]
            kept = not names[0].startswith("gradient_tape") and any(name in backward for name in names)
            label = ("activations" if kept else "temporaries", _layer(names[0]), "")
            owner[identity + first] = labels.setdefault(label, len(labels))
    return Trace(all_events, list(labels), owner)


def _read_by_backward(graph: Graph) -> set[str]:
    makers = {output: node.name for node in graph.nodes for output in node.outputs}
    return {
        makers[name]
        for node in graph.nodes
        if node.name.startswith("gradient_tape")
        for name in node.inputs
        if name in makers
    }


def _layer(name: str) -> str:
    """The layer an operation belongs to: `resnet50/conv1/Conv2D` is `resnet50/conv1`, and so is its gradient."""
    return name.removeprefix("gradient_tape/").rpartition("/")[0]
