"""What rules know of a training: its framework and models, gradients and their accumulation, and when a line runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from buoy.lint.constants import epochs_of, range_length
from buoy.lint.facts import Block, Call, Facts, Scope, literal, once

_KERAS = frozenset({"keras", "tensorflow", "tf_keras"})
_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"})
_CATCHES = frozenset(
    {
        "ImportError",
        "ModuleNotFoundError",
        "AttributeError",
        "NameError",
        "TypeError",
        "ValueError",
        "KeyError",
        "Exception",
        "BaseException",
    }
)
_KERAS_MODELS = frozenset(
    {"Sequential", "Model", "load_model", "clone_model", "model_from_json", "Functional"}
)


def uses_torch(facts: Facts) -> bool:
    """Whether tensors here are torch's (paddle and mxnet also say `loss.backward()`)."""
    return bool(facts.packages & {"torch", "pytorch_lightning", "lightning"}) and not facts.packages & {
        "paddle",
        "mxnet",
        "jittor",
    }


def uses_keras(facts: Facts) -> bool:
    """Whether Keras is imported, by itself or through TensorFlow."""
    return bool(facts.packages & _KERAS)


def is_guarded(block: Block) -> bool:
    """Whether a failure here is expected by the code: inside a `try` that catches it, or behind a test
    of version or presence.
    """
    walk: Block | None = block
    while walk is not None:
        if (
            walk.kind == "try"
            and isinstance(walk.node, ast.Try)
            and any(_catches(handler) for handler in walk.node.handlers)
        ):
            return True
        if walk.kind == "except" and isinstance(walk.node, ast.ExceptHandler) and _catches(walk.node):
            return True  # the old way, kept for old releases
        if walk.kind in ("if", "else") and isinstance(walk.node, ast.If) and _tests_presence(walk.node.test):
            return True
        walk = walk.parent
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CATCHES for kind in kinds)


def _tests_presence(test: ast.expr) -> bool:
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and "version" in node.attr.lower():
            return True
        if isinstance(node, ast.Name) and (
            "version" in node.id.lower()
            or node.id in ("hasattr", "TYPE_CHECKING", "globals", "locals", "dir")
        ):
            return True
        if literal(node) == "__version__":
            return True
    return isinstance(test, ast.Constant) and not test.value


def without_gradients(block: Block, facts: Facts, depth: int = 3) -> bool:
    """Whether code here runs under `no_grad`: a `with` around it, a decorator, a switch before it, or
    at every call of its function.
    """
    walk: Block | None = block
    while walk is not None:
        switches: list[ast.expr] = []
        if isinstance(walk.node, ast.With | ast.AsyncWith):
            switches = [item.context_expr for item in walk.node.items]
        elif isinstance(walk.node, ast.FunctionDef | ast.AsyncFunctionDef):
            switches = walk.node.decorator_list
        if any(_is_no_grad(switch) for switch in switches):
            return True
        walk = walk.parent
    for call in facts.calls.get("set_grad_enabled", ()):
        if isinstance(call.statement, ast.Expr) and call.statement.value is call.node:
            return True  # a switch thrown for good
    function = block.function()
    if function.kind != "function" or depth == 0:
        return False
    sites = facts.calls.get(function.scope.name, [])
    return bool(sites) and all(
        site.block.function() is not function and without_gradients(site.block, facts, depth - 1)
        for site in sites
    )


def _is_no_grad(node: ast.expr) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in _NO_GRAD:
            return True
        if isinstance(part, ast.Name) and part.id in _NO_GRAD:
            return True
    return False


def leaves(loop: Block) -> bool:
    """Whether its body ends with a `break` or `return`: then it runs once."""
    body = getattr(loop.node, "body", [])
    return any(isinstance(statement, ast.Break | ast.Return) for statement in body)


def scope_key(node: ast.AST, block: Block) -> tuple[int, str] | None:
    """A key under which the same variable is found again: its scope and its words."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    scope: Scope | None = block.scope.find(node.id)
    if words and node.id == "self":
        scope = None  # the same object in every method of the class
    return id(scope) if scope else 0, ".".join([node.id, *reversed(words)])


def is_keras_model(node: ast.expr | None, block: Block, facts: Facts) -> bool:
    """Whether an expression is a Keras model: made by Keras, or compiled and fitted here, or returned
    by a function that makes one.
    """
    if node is None or not uses_keras(facts):
        return False
    if isinstance(node, ast.Call):
        return makes_keras_model(node, facts)
    key = scope_key(node, block)
    if key is None:
        return False
    values = facts.values(node, block)
    if any(isinstance(value, ast.Call) and makes_keras_model(value, facts) for value in values):
        return True
    if values and all(
        isinstance(value, ast.Call) and (facts.qualified(value.func) or "").startswith(("torch", "sklearn"))
        for value in values
    ):
        return False
    return any(
        other.receiver is not None and scope_key(other.receiver, other.block) == key and _compiles(other)
        for other in facts.calls.get("compile", ())
    )


def _compiles(call: Call) -> bool:
    words = {keyword.arg for keyword in call.node.keywords}
    return bool(words & {"loss", "optimizer", "metrics"}) or len(call.node.args) >= 2


def makes_keras_model(node: ast.Call, facts: Facts, depth: int = 3) -> bool:
    """Whether a call returns a new Keras model, directly or through a function of this file."""
    name = facts.qualified(node.func)
    if name is None:
        return False
    root, _, _ = name.partition(".")
    tail = name.rpartition(".")[2]
    if root in _KERAS and (tail in _KERAS_MODELS or ".applications." in name):
        return True
    if "." in name or depth == 0:
        return False
    for function in facts.functions.get(name, ()):
        if isinstance(function.node, ast.FunctionDef) and _returns_model(function, facts, depth):
            return True
    return False


def _returns_model(function: Block, facts: Facts, depth: int) -> bool:
    assert isinstance(function.node, ast.FunctionDef)
    for statement in ast.walk(function.node):
        if not isinstance(statement, ast.Return) or statement.value is None:
            continue
        values: list[ast.expr | None] = [statement.value]
        if isinstance(statement.value, ast.Name):
            values = [binding.value for binding in function.scope.bindings.get(statement.value.id, [])]
        if any(
            isinstance(value, ast.Call) and makes_keras_model(value, facts, depth - 1) for value in values
        ):
            return True
    return False


def source_of(node: ast.AST) -> str:
    """Short source text of a node, for messages and for comparing two expressions."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


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
    """The trainings of one document."""

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


@once
def timing_of(facts: Facts) -> Timing:
    """The document's timing."""
    return Timing(facts)


@dataclass(slots=True)
class Guard:
    """One guarded optimizer step."""

    step: Call
    test: ast.expr
    index: ast.Name
    every: ast.expr
    offset: int
    """What is added to the index before the modulo: 1 in `(i + 1) % n`."""
    branch: Block
    loop: Block
    alone: bool
    """The test is the modulo and nothing else: no `or last batch`."""


@once
def find_guards(facts: Facts) -> list[Guard]:
    """Every optimizer step behind a modulo test, in a loop that also calls backward outside that test."""
    guards: list[Guard] = []
    if "torch" not in facts.packages:
        return guards
    for step in facts.calls.get("step", ()):
        branch = next((block for block in step.block.up() if block.kind == "if"), None)
        loops = step.block.loops()
        if branch is None or not loops or not isinstance(branch.node, ast.If) or not branch.inside(loops[0]):
            continue
        found = _modulo(branch.node.test)
        if found is None:
            continue
        backwards = [call for call in facts.calls.get("backward", ()) if call.block.inside(loops[0])]
        # A backward inside the branch is another thing: the generator of a GAN, trained every n-th step.
        if not backwards or any(call.block.inside(branch) for call in backwards):
            continue
        index, every, offset, alone = found
        guards.append(Guard(step, branch.node.test, index, every, offset, branch, loops[0], alone))
    return guards


def guard_index_nodes(facts: Facts) -> set[ast.Name]:
    """The index names of all guards: an undefined one has its own rule."""
    return {guard.index for guard in find_guards(facts)}


def _modulo(test: ast.expr) -> tuple[ast.Name, ast.expr, int, bool] | None:
    alone = True
    if isinstance(test, ast.BoolOp):
        alone = isinstance(test.op, ast.And)
        tests = [value for value in test.values if _modulo(value)]
        if not tests:
            return None
        test = tests[0]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        left: ast.expr = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        left, right = test.left, test.comparators[0]
        if literal(right) != 0:
            return None
    else:
        return None
    if not isinstance(left, ast.BinOp) or not isinstance(left.op, ast.Mod):
        return None
    counter = left.left
    if isinstance(counter, ast.Name):
        return counter, left.right, 0, alone
    if isinstance(counter, ast.BinOp) and isinstance(counter.op, ast.Add):
        parts = (counter.left, counter.right)
        names = [part for part in parts if isinstance(part, ast.Name)]
        numbers = [number for part in parts if isinstance(number := literal(part), int)]
        if len(names) == 1 and len(numbers) == 1:
            return names[0], left.right, numbers[0], alone
    return None
