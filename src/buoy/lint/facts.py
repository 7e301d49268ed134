"""One pass over the syntax trees: everything rules ask about, collected once and indexed by name.

Rules look up a call, an attribute or a string key by its last word (`facts.calls["fit"]`) and then climb the
blocks around it. They never walk a whole tree: that, repeated per rule, is what makes linters slow.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from buoy.lint.ignores import Ignores
from buoy.lint.model import Span
from buoy.lint.sources import Document

_BUILTINS = frozenset(dir(builtins)) | {
    "__file__",
    "__path__",
    "__builtins__",
    "__annotations__",
    "__class__",
    "WindowsError",
    "reveal_type",
}
_IPYTHON = frozenset(
    {
        "get_ipython",
        "display",
        "In",
        "Out",
        "_",
        "__",
        "___",
        "_i",
        "_ii",
        "_iii",
        "_oh",
        "_ih",
        "_dh",
        "exit",
        "quit",
    }
)
LOOPS = ("for", "while")


class Scope:
    """A namespace: module, function, class or comprehension."""

    __slots__ = ("bindings", "foreign", "kind", "loads", "name", "node", "parent")

    def __init__(self, kind: str, node: ast.AST | None, parent: Scope | None, name: str = "") -> None:
        self.kind, self.node, self.parent, self.name = kind, node, parent, name
        self.bindings: dict[str, list[Binding]] = {}
        self.loads: list[tuple[str, ast.Name, Block]] = []
        self.foreign: dict[str, str] = {}
        """Names declared `global` or `nonlocal` here."""

    def find(self, name: str) -> Scope | None:
        """The scope that binds a name seen from here; class bodies are invisible to what is nested in them."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bindings and (
                scope.kind != "class" or scope is self or self.kind == "comprehension"
            ):
                return scope
            scope = scope.parent
        return None


class Block:
    """A stretch of code that runs together: a body of a loop, a branch, a `with`, a function."""

    __slots__ = ("kind", "node", "parent", "scope")

    def __init__(self, kind: str, node: ast.AST | None, parent: Block | None, scope: Scope) -> None:
        self.kind, self.node, self.parent, self.scope = kind, node, parent, scope

    def up(self) -> Iterator[Block]:
        """This block and those around it, innermost first, ending with the function or module that holds it."""
        block: Block | None = self
        while block is not None:
            yield block
            if block.kind in ("function", "module", "class", "lambda"):
                return
            block = block.parent

    def loops(self) -> list[Block]:
        """The loops around it in the same function, innermost first."""
        return [block for block in self.up() if block.kind in LOOPS]

    def function(self) -> Block:
        """The function (or module, class, lambda) body that holds it."""
        *_, last = self.up()
        return last

    def inside(self, other: Block) -> bool:
        """Whether this block is `other` or nested in it."""
        block: Block | None = self
        while block is not None:
            if block is other:
                return True
            block = block.parent
        return False


class Binding:
    """One place that gives a name a value."""

    __slots__ = ("block", "how", "node", "value")

    def __init__(self, how: str, node: ast.AST, value: ast.expr | None, block: Block) -> None:
        self.how, self.node, self.value, self.block = how, node, value, block


class Call:
    """A call, the words it was written with, and where it stands."""

    __slots__ = ("block", "dotted", "node", "statement", "tail")

    def __init__(self, node: ast.Call, dotted: str, tail: str, block: Block, statement: ast.stmt) -> None:
        self.node, self.dotted, self.tail, self.block, self.statement = node, dotted, tail, block, statement

    @property
    def receiver(self) -> ast.expr | None:
        """What a method is called on; None for a plain function."""
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    def keyword(self, name: str) -> ast.expr | None:
        """The value of a keyword argument."""
        return next((item.value for item in self.node.keywords if item.arg == name), None)

    def argument(self, position: int, name: str) -> ast.expr | None:
        """An argument given by position or by keyword; None when it is absent or hidden in `*args`."""
        if position < len(self.node.args):
            is_starred = any(isinstance(item, ast.Starred) for item in self.node.args[: position + 1])
            return None if is_starred else self.node.args[position]
        return self.keyword(name)

    @property
    def has_unknown_keywords(self) -> bool:
        """`**kwargs`: an absent keyword may be in there."""
        return any(item.arg is None for item in self.node.keywords)


class Seen:
    """A node and the block it stands in."""

    __slots__ = ("block", "node", "statement")

    def __init__(self, node: Any, block: Block, statement: ast.stmt) -> None:
        self.node, self.block, self.statement = node, block, statement


class Facts:
    """What is known of one document after the pass."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.module = Scope("module", None, None)
        self.root = Block("module", None, None, self.module)
        self.imports: dict[str, str] = {}
        """Local name to the qualified name it stands for: `np` to `numpy`, `Adam` to `keras.optimizers.Adam`."""
        self.imported: list[tuple[str, ast.stmt, Block]] = []
        """Every imported qualified name, with its statement."""
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.attributes: dict[str, list[Seen]] = defaultdict(list)
        self.keys: dict[str, list[Seen]] = defaultdict(list)
        """Subscripts with a constant string."""
        self.functions: dict[str, list[Block]] = defaultdict(list)
        self.fields: dict[str, list[Binding]] = defaultdict(list)
        """Assignments to attributes, by their words (`self.model`)."""
        self.additions: list[Seen] = []
        """Augmented assignments."""
        self.handlers: list[Seen] = []
        self.blocks: list[Block] = []
        self.scopes: list[Scope] = [self.module]
        self.opaque = any(cell.opaque for cell in document.cells)
        """Names may exist that no source here defines (`import *`, `exec`, `%run`)."""
        self.memo: dict[str, Any] = {}
        """What rules worked out and share with each other."""
        self.packages: set[str] = set()
        """Top-level packages imported anywhere."""
        self.deleted: list[tuple[str, ast.Delete, Block]] = []
        """Names taken away by `del`."""
        self.ignores = Ignores(document)

    def span(self, node: ast.AST) -> Span:
        """Where a node stands."""
        return self.document.span(node)

    def text(self, node: ast.AST) -> str:
        """The source of a node."""
        return self.document.text(self.document.span(node))

    def hidden(self, code: str, node: ast.AST) -> bool:
        """Whether a comment hides this rule at this place; a rule asks before it joins several places."""
        return bool(self.ignores) and self.ignores.hides(code, self.span(node))

    def release(self) -> None:
        """Cut the circles between scopes, bindings and blocks, so that the trees go without a garbage collection."""
        for scope in self.scopes:
            scope.bindings.clear()
            scope.loads.clear()
        self.memo.clear()

    def qualified(self, node: ast.AST) -> str | None:
        """The full name of `np.zeros` or `Adam` through the imports; None when it is not a plain dotted name."""
        dotted = dotted_name(node)
        return self.resolve(dotted) if dotted else None

    def resolve(self, dotted: str) -> str:
        """A dotted name with its first word replaced by what it was imported as."""
        root, dot, rest = dotted.partition(".")
        base = self.imports.get(root)
        return dotted if base is None else base + dot + rest

    def called(self, *names: str) -> Iterator[Call]:
        """Calls whose qualified name is one of these."""
        for name in names:
            for call in self.calls.get(name.rpartition(".")[2], ()):
                if self.resolve(call.dotted) == name:
                    yield call

    def values(self, node: ast.AST, block: Block) -> list[ast.expr | None]:
        """Everything that was ever assigned to the name or attribute, seen from a block; None for what
        is unknown.
        """
        return [binding.value for binding in self.bindings(node, block)]

    def bindings(self, node: ast.AST, block: Block) -> list[Binding]:
        """The bindings of a name or attribute, seen from a block."""
        if isinstance(node, ast.Name):
            scope = block.scope.find(node.id)
            return scope.bindings[node.id] if scope else []
        dotted = dotted_name(node)
        return self.fields.get(dotted, []) if dotted else []

    def single_value(self, node: ast.AST, block: Block) -> ast.expr | None:
        """The value of a name that is assigned exactly once."""
        values = self.values(node, block)
        return values[0] if len(values) == 1 else None


Answer = TypeVar("Answer")


def once(find: Callable[[Facts], Answer]) -> Callable[[Facts], Answer]:
    """A question about a document that several rules ask: worked out for the first, kept for the others."""

    def answer(facts: Facts) -> Answer:
        if find.__qualname__ not in facts.memo:
            facts.memo[find.__qualname__] = find(facts)
        found: Answer = facts.memo[find.__qualname__]
        return found

    return answer


def literal(node: ast.AST | None) -> Any:
    """The constant that is written there; None for everything else."""
    return node.value if isinstance(node, ast.Constant) else None


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` as written; None when anything but names and dots is in it."""
    if isinstance(node, ast.Name):
        return node.id
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    words.append(node.id)
    return ".".join(reversed(words))


def known_without_import(name: str, document: Document) -> bool:
    """Names that exist without being bound: built-ins, and IPython's own in notebooks and exported notebooks."""
    if name in _BUILTINS:
        return True
    return name in _IPYTHON and (
        document.kind != "python" or name == "get_ipython" or _was_notebook(document)
    )


def _was_notebook(document: Document) -> bool:
    return any(
        mark in cell.text for cell in document.cells[:1] for mark in ("# In[", "# %%", "get_ipython()", "#%%")
    )
