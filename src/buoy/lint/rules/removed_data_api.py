"""BY206: names that NumPy, pandas or Pillow no longer have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Edit, Finding, Fix, Rule
from buoy.lint.removed import removed_uses, strike
from buoy.lint.target import Target, removed

RULE = Rule("BY206", "removed-data-api", "a name that NumPy, pandas or Pillow no longer has")

# What NumPy's own messages say to write instead.
_SAFE = {
    "numpy.float": "float",
    "numpy.int": "int",
    "numpy.object": "object",
    "numpy.str": "str",
    "numpy.complex": "complex",
}
_MEMBERS = {
    "numpy.float_": "float64",
    "numpy.product": "prod",
    "numpy.cumproduct": "cumprod",
    "numpy.NaN": "nan",
    "numpy.Inf": "inf",
    "numpy.infty": "inf",
    "numpy.unicode_": "str_",
    "numpy.string_": "bytes_",
    "numpy.row_stack": "vstack",
    "numpy.alltrue": "all",
    "numpy.sometrue": "any",
    "numpy.NAN": "nan",
    "numpy.NINF": "-inf",
    "numpy.complex_": "complex128",
    "PIL.Image.ANTIALIAS": "LANCZOS",
}
_FRAME_MAKERS = (
    "DataFrame",
    "read_csv",
    "read_excel",
    "read_json",
    "read_parquet",
    "read_pickle",
    "read_table",
    "concat",
    "merge",
    "get_dummies",
)
_HINTS = {
    "append": "`pd.concat([df, other])`",
    "as_matrix": "`.to_numpy()`",
    "iteritems": "`.items()`",
    "applymap": "`.map(...)`",
    "ix": "`.loc` or `.iloc`",
    "get_value": "`.at[...]`",
    "mad": "`(df - df.mean()).abs().mean()`",
}


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Removed names, then removed methods on what surely is a frame."""
    if facts.packages & {"numpy", "PIL", "pandas"}:
        for name, library, since, node, block in removed_uses(facts, target, ("numpy", "pandas", "pillow")):
            version = removed()[library]["version"]
            failure = "ImportError" if isinstance(node, ast.Import | ast.ImportFrom) else "AttributeError"
            message = (
                f"`{name}` is gone: not in {library} {since} nor later (tried in {version}); "
                f"{failure}{strike(facts, block, getattr(node, 'lineno', 1))}"
            )
            yield Finding(facts.document.span(node), "error", message, _hint(name), _fix(name, node, facts))
    if "pandas" in facts.packages:
        methods = removed()["pandas"]["methods"]["pandas.DataFrame"]
        for method in methods.keys() & facts.calls.keys():
            for call in facts.calls[method]:
                if (
                    _on_frame(call, facts)
                    and not is_guarded(call.block)
                    and target.lacks("pandas", methods[method], facts)
                ):
                    message = (
                        f"`DataFrame.{method}` is gone from pandas: "
                        f"AttributeError{strike(facts, call.block, call.node.lineno)}"
                    )
                    yield Finding(
                        facts.document.span(call.node.func),
                        "error",
                        message,
                        _HINTS.get(method, "see the pandas release notes"),
                    )


def _on_frame(call: Call, facts: Facts) -> bool:
    receiver = call.receiver
    if not isinstance(receiver, ast.Name | ast.Attribute):
        return False
    values = facts.values(receiver, call.block)
    if call.tail == "append" and not (
        isinstance(call.statement, ast.Assign) or call.keyword("ignore_index") is not None
    ):
        return False  # a list: its append returns nothing, so nobody assigns it
    made = [value for value in values if isinstance(value, ast.Call)]
    frames = [
        value
        for value in made
        if (facts.qualified(value.func) or "").startswith("pandas.")
        and (facts.qualified(value.func) or "").rpartition(".")[2] in _FRAME_MAKERS
    ]
    if call.tail == "append" and call.keyword("ignore_index") is not None:
        return True
    # Any assignment that is no frame leaves the type open.
    others = [value for value in values if value not in frames and not _own_method(value, receiver)]
    return bool(frames) and not others


def _own_method(value: ast.expr | None, receiver: ast.expr) -> bool:
    """`df = df.dropna()`: still a frame."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and ast.dump(value.func.value) == ast.dump(receiver).replace("Store()", "Load()")
    )


def _hint(name: str) -> str:
    if name in _SAFE:
        return f"write `{_SAFE[name]}`"
    return (
        f"write `{name.split('.')[0].replace('numpy', 'np')}.{_MEMBERS[name]}`"
        if name in _MEMBERS
        else f"{name.split('.')[0]}'s release notes name the successor"
    )


def _fix(name: str, node: ast.AST, facts: Facts) -> Fix | None:
    if not isinstance(node, ast.Attribute):
        return None
    span = facts.document.span(node)
    if name in _SAFE:
        return Fix(f"write `{_SAFE[name]}`", (Edit(span, _SAFE[name]),), "safe")
    if name in _MEMBERS and span.line == span.end_line:
        module = facts.document.text(facts.document.span(node.value))
        text = f"-{module}.inf" if name == "numpy.NINF" else f"{module}.{_MEMBERS[name]}"
        return Fix(f"write `{text}`", (Edit(span, text),), "safe")
    return None
