"""BY206: names that NumPy, pandas or Pillow no longer have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Edit, Finding, Fix, Rule
from buoy.lint.removed import Use, removed_uses, strike
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
    "numpy.complex_": "complex128",
    "PIL.Image.ANTIALIAS": "LANCZOS",
}
# How people write the module.
_WRITTEN = {"numpy": "np", "PIL.Image": "Image"}
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
        for use in removed_uses(facts, target, ("numpy", "pandas", "pillow")):
            if use.hide(RULE.code, facts):
                span = facts.document.span(use.node)
                yield Finding(span, "error", use.message(facts), _hint(use.name), _fix(use, facts))
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
    if name in _MEMBERS:
        home = name.rpartition(".")[0]
        return f"write `{_WRITTEN.get(home, home)}.{_MEMBERS[name]}`"
    return f"{name.split('.')[0]}'s release notes name the successor"


def _fix(use: Use, facts: Facts) -> Fix | None:
    """Write the successor in every place at once."""
    if use.name not in _SAFE and use.name not in _MEMBERS:
        return None
    edits = []
    for node, _ in use.places:
        if not isinstance(node, ast.Attribute):
            return None
        module = facts.document.text(facts.document.span(node.value))
        text = _SAFE.get(use.name) or f"{module}.{_MEMBERS[use.name]}"
        edits.append(Edit(facts.document.span(node), text))
    return Fix(f"write `{edits[0].text}`", tuple(edits), "safe")
