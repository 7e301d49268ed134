"""The pass itself: visits every node once and fills Facts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from buoy.lint.facts import Binding, Block, Call, Facts, Scope, Seen, dotted_name
from buoy.lint.sources import Document, read_magic

_EVAL_CALLS = frozenset({"exec", "globals", "locals", "vars", "execfile"})


def collect(document: Document) -> Facts:
    """Read all parsed cells of a document."""
    facts = Facts(document)
    collector = _Collector(facts)
    for cell in document.cells:
        for name in cell.binds:
            facts.module.bindings.setdefault(name, [])
        if cell.tree is not None:
            collector.body(cell.tree.body)
        elif cell.problem is not None:
            # What a broken cell defines cannot be read; every word in it may be a name.
            for word in _words(cell.text):
                facts.module.bindings.setdefault(word, [])
    return facts


def _words(text: str) -> set[str]:
    import re

    return set(re.findall(r"[A-Za-z_]\w*", text[:200_000]))


class _Collector:
    """Holds where we are; one method per node type that means something."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.block = facts.root
        self.scope = facts.module
        self.statement: ast.stmt = ast.Pass()
        self.handlers: dict[type, Callable[[Any], None]] = {
            ast.Name: self.name,
            ast.Attribute: self.attribute,
            ast.Call: self.call,
            ast.Constant: self.nothing,
            ast.Subscript: self.subscript,
            ast.Assign: self.assign,
            ast.AugAssign: self.augmented,
            ast.AnnAssign: self.annotated,
            ast.NamedExpr: self.walrus,
            ast.For: self.loop,
            ast.AsyncFor: self.loop,
            ast.While: self.repeat,
            ast.If: self.branch,
            ast.With: self.context,
            ast.AsyncWith: self.context,
            ast.Try: self.attempt,
            ast.TryStar: self.attempt,
            ast.FunctionDef: self.function,
            ast.AsyncFunctionDef: self.function,
            ast.ClassDef: self.class_,
            ast.Lambda: self.lambda_,
            ast.ListComp: self.comprehension,
            ast.SetComp: self.comprehension,
            ast.GeneratorExp: self.comprehension,
            ast.DictComp: self.comprehension,
            ast.Import: self.import_,
            ast.ImportFrom: self.import_from,
            ast.Global: self.foreign,
            ast.Nonlocal: self.foreign,
            ast.Delete: self.delete,
            ast.MatchAs: self.capture,
            ast.MatchStar: self.capture,
            ast.MatchMapping: self.capture,
        }

    # walking

    def body(self, statements: list[ast.stmt]) -> None:
        handlers = self.handlers
        for statement in statements:
            self.statement = statement
            handlers.get(type(statement), self.generic)(statement)

    def visit(self, node: ast.AST | None) -> None:
        if node is not None:
            self.handlers.get(type(node), self.generic)(node)

    def generic(self, node: ast.AST) -> None:
        handlers = self.handlers
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        handlers.get(type(item), self.generic)(item)
            elif isinstance(value, ast.AST):
                handlers.get(type(value), self.generic)(value)

    def nothing(self, node: ast.AST) -> None:
        pass

    def nested(self, kind: str, node: ast.AST, statements: list[ast.stmt]) -> None:
        if not statements:
            return
        outer, statement = self.block, self.statement
        self.block = Block(kind, node, outer, self.scope)
        self.facts.blocks.append(self.block)
        self.body(statements)
        self.block, self.statement = outer, statement

    # names

    def bind(self, name: str, how: str, node: ast.AST, value: ast.expr | None = None) -> None:
        scope = self.scope
        while how == "walrus" and scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        declared = scope.foreign.get(name)
        if declared == "global":
            scope = self.facts.module
        elif declared == "nonlocal" and scope.parent is not None:
            scope = scope.parent.find(name) or scope.parent
        bindings = scope.bindings.get(name)
        if bindings is None:
            bindings = scope.bindings[name] = []
        bindings.append(Binding(how, node, value, self.block))

    def name(self, node: ast.Name) -> None:
        self.scope.loads.append((node.id, node, self.block))

    def target(self, node: ast.expr, how: str, value: ast.expr | None) -> None:
        if isinstance(node, ast.Name):
            self.bind(node.id, how, node, value)
        elif isinstance(node, ast.Tuple | ast.List):
            parts: list[ast.expr | None] = [None] * len(node.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(node.elts):
                parts = list(value.elts)
            for item, part in zip(node.elts, parts, strict=True):
                self.target(item, how, part)
        elif isinstance(node, ast.Starred):
            self.target(node.value, how, None)
        else:
            if isinstance(node, ast.Attribute) and (dotted := dotted_name(node)):
                self.facts.fields[dotted].append(Binding(how, node, value, self.block))
            self.visit(node)

    # expressions

    def attribute(self, node: ast.Attribute) -> None:
        self.facts.attributes[node.attr].append(Seen(node, self.block, self.statement))
        self.visit(node.value)

    def call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            tail = dotted = function.id
            if tail in _EVAL_CALLS and (
                tail == "exec" or self.scope is self.facts.module or tail == "globals"
            ):
                self.facts.opaque = True
        elif isinstance(function, ast.Attribute):
            tail = function.attr
            dotted = dotted_name(function) or "?." + tail
            if tail in ("run_cell_magic", "run_line_magic", "magic"):
                self.exported_magic(node)
        else:
            tail = dotted = ""
        self.facts.calls[tail].append(Call(node, dotted, tail, self.block, self.statement))
        self.visit(function)
        handlers = self.handlers
        for argument in node.args:
            handlers.get(type(argument), self.generic)(argument)
        for keyword in node.keywords:
            handlers.get(type(keyword.value), self.generic)(keyword.value)

    def exported_magic(self, node: ast.Call) -> None:
        code = read_magic(node)
        self.facts.opaque = self.facts.opaque or code.opaque
        statement = self.statement
        self.body(code.statements)
        self.statement = statement

    def subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self.facts.keys[node.slice.value].append(Seen(node, self.block, self.statement))
        self.visit(node.value)
        self.visit(node.slice)

    def walrus(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target.id, "walrus", node.target, node.value)

    def lambda_(self, node: ast.Lambda) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            self.visit(default)
        self.within(
            Scope("function", node, self.scope, "<lambda>"),
            "lambda",
            node,
            lambda: self.visit(node.body),
            node.args,
        )

    def comprehension(self, node: Any) -> None:
        self.visit(node.generators[0].iter)

        def inner() -> None:
            for index, generator in enumerate(node.generators):
                if index:
                    self.visit(generator.iter)
                self.target(generator.target, "for", None)
                for test in generator.ifs:
                    self.visit(test)
            if isinstance(node, ast.DictComp):
                self.visit(node.key)
                self.visit(node.value)
            else:
                self.visit(node.elt)

        self.within(Scope("comprehension", node, self.scope), "comprehension", node, inner, None)

    def within(
        self,
        scope: Scope,
        kind: str,
        node: ast.AST,
        inner: Callable[[], None],
        arguments: ast.arguments | None,
    ) -> None:
        outer = self.scope, self.block, self.statement
        self.facts.scopes.append(scope)
        self.scope = scope
        self.block = Block(kind, node, outer[1], scope)
        self.facts.blocks.append(self.block)
        if arguments is not None:
            for argument in [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ]:
                if argument is not None:
                    self.bind(argument.arg, "argument", argument)
        inner()
        self.scope, self.block, self.statement = outer

    # statements

    def assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.target(target, "assign", node.value)

    def augmented(self, node: ast.AugAssign) -> None:
        self.facts.additions.append(Seen(node, self.block, node))
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.name(node.target)
        self.target(node.target, "augmented", None)

    def annotated(self, node: ast.AnnAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name) and node.value is None and self.scope.kind == "function":
            return
        self.target(node.target, "assign", node.value)

    def loop(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        outer = self.block
        self.block = Block("for", node, outer, self.scope)
        self.facts.blocks.append(self.block)
        self.target(node.target, "for", None)
        self.body(node.body)
        self.block, self.statement = outer, node
        self.nested("else", node, node.orelse)

    def repeat(self, node: ast.While) -> None:
        self.visit(node.test)
        self.nested("while", node, node.body)
        self.nested("else", node, node.orelse)

    def branch(self, node: ast.If) -> None:
        self.visit(node.test)
        self.nested("if", node, node.body)
        self.nested("else", node, node.orelse)

    def context(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.target(item.optional_vars, "with", item.context_expr)
        self.nested("with", node, node.body)

    def attempt(self, node: ast.Try | ast.TryStar) -> None:
        self.nested("try", node, node.body)
        for handler in node.handlers:
            self.facts.handlers.append(Seen(handler, self.block, node))
            self.visit(handler.type)
            if handler.name:
                self.bind(handler.name, "except", handler)
            self.nested("except", handler, handler.body)
        self.nested("else", node, node.orelse)
        self.nested("finally", node, node.finalbody)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            self.visit(default)
        self.bind(node.name, "def", node)
        scope = Scope("function", node, self.scope, node.name)
        self.type_parameters(node, scope)
        before = len(self.facts.blocks)
        self.within(scope, "function", node, lambda: self.body(node.body), node.args)
        self.facts.functions[node.name].append(self.facts.blocks[before])

    def class_(self, node: ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        for base in [*node.bases, *(keyword.value for keyword in node.keywords)]:
            self.visit(base)
        self.bind(node.name, "class", node)
        scope = Scope("class", node, self.scope, node.name)
        for name in ("__class__", "__module__", "__qualname__"):
            scope.bindings[name] = []
        self.type_parameters(node, scope)
        self.within(scope, "class", node, lambda: self.body(node.body), None)

    def type_parameters(self, node: ast.AST, scope: Scope) -> None:
        for parameter in getattr(node, "type_params", ()):
            scope.bindings.setdefault(parameter.name, [])

    def import_(self, node: ast.Import) -> None:
        for item in node.names:
            self.facts.packages.add(item.name.partition(".")[0])
            self.facts.imported.append((item.name, node, self.block))
            if item.asname:
                self.facts.imports[item.asname] = item.name
                self.bind(item.asname, "import", node)
            else:
                root = item.name.partition(".")[0]
                self.facts.imports[root] = root
                self.bind(root, "import", node)

    def import_from(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        self.facts.packages.add(module.partition(".")[0])
        for item in node.names:
            if item.name == "*":
                self.facts.opaque = True
                self.facts.imported.append((module, node, self.block))
                continue
            full = f"{module}.{item.name}"
            self.facts.imported.append((full, node, self.block))
            self.facts.imports[item.asname or item.name] = full
            self.bind(item.asname or item.name, "import", node)

    def foreign(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            self.scope.foreign[name] = "global" if isinstance(node, ast.Global) else "nonlocal"
            if isinstance(node, ast.Global):
                self.facts.module.bindings.setdefault(name, [])

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.facts.deleted.append((target.id, node, self.block))
            else:
                self.visit(target)

    def capture(self, node: Any) -> None:
        name = getattr(node, "rest" if isinstance(node, ast.MatchMapping) else "name", None)
        if name:
            self.bind(name, "match", node)
        self.generic(node)
