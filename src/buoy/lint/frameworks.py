"""What rules know of the frameworks: which is in use, what is a model, what runs without gradients."""

from __future__ import annotations

import ast

from buoy.lint.facts import Block, Call, Facts, Scope

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
        if walk.kind in ("except",) and isinstance(walk.node, ast.ExceptHandler) and _catches(walk.node):
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
        if isinstance(node, ast.Constant) and node.value == "__version__":
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
