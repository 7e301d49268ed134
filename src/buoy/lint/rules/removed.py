"""BY201, BY204, BY205, BY206, BY207: names, arguments and keys that newer releases no longer have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from buoy.lint.facts import Block, Call, Facts, Seen, literal
from buoy.lint.model import Edit, Finding, Fix, Rule, Safety, Span
from buoy.lint.target import Target, removed
from buoy.lint.training import is_guarded, is_keras_model, timing_of, uses_keras


@cache
def _names(libraries: tuple[str, ...]) -> tuple[dict[str, tuple[str, str]], frozenset[str]]:
    """Qualified name to library and release, and the set of last words."""
    names = {
        name: (library, since) for library in libraries for name, since in removed()[library]["names"].items()
    }
    return names, frozenset(name.rpartition(".")[2] for name in names)


@dataclass(slots=True)
class Use:
    """A removed name and the places where the file uses it, in order."""

    name: str
    library: str
    since: str
    places: list[tuple[ast.AST, Block]]

    @property
    def node(self) -> ast.AST:
        """Where the failure comes first."""
        return self.places[0][0]

    @property
    def block(self) -> Block:
        """The block of the first place."""
        return self.places[0][1]

    def hide(self, code: str, facts: Facts) -> bool:
        """Drop the places that comments hide; False when none is left."""
        self.places = [place for place in self.places if not facts.hidden(code, place[0])]
        return bool(self.places)

    def message(self, facts: Facts) -> str:
        """What happens, and when."""
        table = removed()[self.library]
        failure = "ImportError" if isinstance(self.node, ast.Import | ast.ImportFrom) else "AttributeError"
        if self.name in table.get("raising", ()):
            failure = "it is still there, but only raises RuntimeError"
        tried = table["version"]
        more = f" ({len(self.places)} uses)" if len(self.places) > 1 else ""
        when = strike(facts, self)
        gone = f"`{self.name}` is gone{more}: not in {self.library} {self.since} nor later (tried in {tried})"
        return f"{gone}; {failure}{when}"


def removed_uses(facts: Facts, target: Target, libraries: tuple[str, ...]) -> list[Use]:
    """Every removed name that is imported or reached, once each."""
    names, tails = _names(libraries)
    places: list[tuple[str, ast.AST, Block]] = []
    for full, statement, block in facts.imported:
        found = _longest(full, names)
        if found:
            places.append((found, statement, block))
    for tail in tails & facts.attributes.keys():
        for seen in facts.attributes[tail]:
            name = facts.qualified(seen.node)
            if name in names and _through_import(seen.node, facts):
                places.append((name, seen.node, seen.block))
    uses: dict[str, Use] = {}
    for name, node, block in sorted(places, key=_order):
        if meets(block, *names[name], facts, target):
            uses.setdefault(name, Use(name, *names[name], [])).places.append((node, block))
    return list(uses.values())


def _order(place: tuple[str, ast.AST, Block]) -> tuple[int, int, str]:
    name, node, _ = place
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0), name


def _longest(full: str, names: dict[str, tuple[str, str]]) -> str | None:
    """The removed name or module that an import goes through."""
    parts = full.split(".")
    return next(
        (name for size in range(2, len(parts) + 1) if (name := ".".join(parts[:size])) in names), None
    )


def _through_import(node: ast.expr, facts: Facts) -> bool:
    """Whether the first word really is the module: not rebound by the file itself."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return (
        isinstance(node, ast.Name)
        and node.id in facts.imports
        and all(binding.how == "import" for binding in facts.module.bindings.get(node.id, ()))
    )


def drop_argument(keyword: ast.keyword, facts: Facts, safety: Safety) -> Fix | None:
    """Take an argument out with the comma in front of it; only on one line, where that comma is easy to see."""
    span = facts.span(keyword)
    before = facts.document.line(span.line)[: span.column].rstrip()
    if span.line != span.end_line or not before.endswith(","):
        return None
    edit = Edit(Span(span.line, len(before) - 1, span.line, span.end_column), "")
    return Fix(f"drop `{keyword.arg}`", (edit,), safety)


def meets(block: Block, library: str, since: str, facts: Facts, target: Target) -> bool:
    """Whether code here will meet a release from which something is gone, and does not expect that."""
    return not is_guarded(block) and target.lacks(library, since, facts)


def gone_arguments(
    call: Call, library: str, gone: dict[str, str], facts: Facts, target: Target
) -> Iterator[ast.keyword]:
    """The arguments of a call that the release it will meet no longer takes."""
    for keyword in call.node.keywords:
        if keyword.arg in gone and meets(call.block, library, gone[keyword.arg], facts, target):
            yield keyword


def strike(facts: Facts, place: Call | Seen | Use) -> str:
    """`, after 20 epochs of training`: when the failure comes; empty when it comes before."""
    moment = timing_of(facts).moment(place.block, getattr(place.node, "lineno", 1))
    return f", {moment.words}" if moment.when == "after" else ""


REMOVED_API = Rule(
    "BY201", "removed-keras-api", "a name or method that Keras 3 or TensorFlow 2 no longer has"
)

_HINTS = {
    "fit_generator": "`model.fit` takes generators",
    "predict_generator": "`model.predict` takes generators",
    "evaluate_generator": "`model.evaluate` takes generators",
    "predict_classes": "use `model.predict(x).argmax(axis=-1)`",
    "predict_proba": "use `model.predict(x)`",
    "to_yaml": "use `model.to_json()`",
    "keras.utils.np_utils": "`from keras.utils import to_categorical`",
    "keras.layers.convolutional": "`from keras.layers import ...`",
    "keras.layers.normalization": "`from keras.layers import BatchNormalization`",
    "keras.layers.core": "`from keras.layers import ...`",
    "keras.wrappers.scikit_learn": "use the `scikeras` package",
    "tensorflow.Session": "TensorFlow 2 runs eagerly: no session is needed",
    "tensorflow.placeholder": "TensorFlow 2 runs eagerly: pass the tensors",
    "tensorflow.contrib": "`contrib` was split up into other packages",
    "keras.preprocessing.image.ImageDataGenerator": (
        "`from tensorflow.keras.preprocessing.image import ImageDataGenerator` still works"
    ),
}
# Names that leave together: from this many on they are one finding.
_MANY = 3
_GROUPS = {
    "tensorflow": (
        "this is TensorFlow 1 code",
        "`import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()` runs most of it; `tf_upgrade_v2` rewrites it",
    ),
    "keras.backend": (
        "this uses the Keras 2 backend",
        "`keras.ops` has most of what `keras.backend` had",
    ),
}
_RENAMED = {"fit_generator": "fit", "predict_generator": "predict", "evaluate_generator": "evaluate"}
# The arguments that the generator methods and their successors share; any other makes the renaming a guess.
_SHARED = frozenset(
    {
        "steps_per_epoch",
        "epochs",
        "verbose",
        "callbacks",
        "validation_data",
        "validation_steps",
        "class_weight",
        "shuffle",
        "initial_epoch",
        "steps",
        "validation_freq",
    }
)


def find_removed_api(facts: Facts, target: Target) -> Iterator[Finding]:
    """Removed names through imports and attributes, then removed methods of models."""
    if not uses_keras(facts):
        return
    groups: dict[str, list[Use]] = {}
    for use in removed_uses(facts, target, ("keras", "tensorflow")):
        groups.setdefault(_group(use), []).append(use)
    for group, uses in groups.items():
        if group in _GROUPS and len(uses) >= _MANY:
            yield _together(group, uses, facts)
            for use in uses:  # comments on other lines of it are no less needed
                use.hide(REMOVED_API.code, facts)
            continue
        for use in (use for use in uses if use.hide(REMOVED_API.code, facts)):
            hint = _HINTS.get(use.name) or _compat_hint(use.name)
            yield Finding(facts.span(use.node), "error", use.message(facts), hint)
    methods = removed()["keras"]["methods"]["keras.Sequential"]
    for method in methods.keys() & facts.calls.keys():
        for call in facts.calls[method]:
            if _is_model_method(call, facts) and meets(call.block, "keras", "3.0.0", facts, target):
                yield _method(call, facts)


def _group(use: Use) -> str:
    if use.library == "tensorflow":
        return "tensorflow"
    return "keras.backend" if use.name.startswith("keras.backend.") else use.name


def _together(group: str, uses: list[Use], facts: Facts) -> Finding:
    """One finding for code of another age: its names are gone all together, and are fixed all together."""
    first = uses[0]
    what, hint = _GROUPS[group]
    shown = ", ".join(f"`{use.name}`" for use in uses[:3])
    when = strike(facts, first)
    tried = removed()[first.library]["version"]
    message = (
        f"{what}: {len(uses)} names it uses are gone ({shown}, ...; tried in {first.library} "
        f"{tried}); it fails here{when}"
    )
    return Finding(facts.span(first.node), "error", message, hint)


def _is_model_method(call: Call, facts: Facts) -> bool:
    if call.receiver is None:
        return False
    if call.tail not in _RENAMED and call.tail != "predict_classes":
        return is_keras_model(call.receiver, call.block, facts)
    # No other library in use has methods of these names; a class of the user's own may.
    return call.tail not in facts.functions and not _is_something_else(call, facts)


def _is_something_else(call: Call, facts: Facts) -> bool:
    """Made by a class or function that was imported from elsewhere than Keras."""
    assert call.receiver is not None
    made = [value for value in facts.values(call.receiver, call.block) if isinstance(value, ast.Call)]
    names = [facts.qualified(value.func) or "" for value in made]
    return bool(names) and all(
        "." in name and name.split(".")[0] not in ("keras", "tensorflow", "tf_keras") for name in names
    )


def _method(call: Call, facts: Facts) -> Finding:
    function = call.node.func
    assert isinstance(function, ast.Attribute)
    span = facts.span(function)
    name = Span(span.end_line, span.end_column - len(call.tail), span.end_line, span.end_column)
    fix = None
    if call.tail in _RENAMED:
        words = {keyword.arg for keyword in call.node.keywords}
        sure = is_keras_model(call.receiver, call.block, facts)
        plain = sure and len(call.node.args) <= 1 and words <= _SHARED
        fix = Fix(
            f"rename to `{_RENAMED[call.tail]}`",
            (Edit(name, _RENAMED[call.tail]),),
            "safe" if plain else "unsafe",
        )
    message = f"`{call.tail}` is gone from Keras models: AttributeError{strike(facts, call)}"
    return Finding(name, "error", message, _HINTS.get(call.tail, "see the Keras 3 migration guide"), fix)


def _compat_hint(name: str) -> str:
    if name.startswith("tensorflow.") and not name.startswith("tensorflow.keras"):
        return (
            f"for TensorFlow 1 code: `tf.compat.v1.{name.split('.', 1)[1]}`, or move to the TensorFlow 2 way"
        )
    if name.startswith("keras.backend."):
        return f"`keras.ops` has most of what `keras.backend` had: try `keras.ops.{name.rpartition('.')[2]}`"
    return (
        f"import `{name.rpartition('.')[2]}` from where Keras 3 keeps it, or set "
        "`TF_USE_LEGACY_KERAS=1` with `tf_keras` installed"
    )


REMOVED_ARGUMENT = Rule("BY205", "removed-keras-argument", "an argument that Keras 3 no longer takes")

_NEW_ARGUMENT_NAMES = {"lr": "learning_rate"}


def find_removed_argument(facts: Facts, target: Target) -> Iterator[Finding]:
    """Calls of Keras classes and model methods with a removed keyword."""
    if not uses_keras(facts):
        return
    for owner, keywords in removed()["keras"]["keywords"].items():
        if owner == "keras.callbacks.ModelCheckpoint":  # BY203 has more to say of it
            continue
        for call in _calls(owner, facts):
            for keyword in gone_arguments(call, "keras", keywords, facts, target):
                yield _finding(call, keyword, owner, facts)


def _calls(owner: str, facts: Facts) -> list[Call]:
    if owner.startswith("keras.Model."):
        method = owner.rpartition(".")[2]
        return [
            call for call in facts.calls.get(method, ()) if is_keras_model(call.receiver, call.block, facts)
        ]
    # `tf.keras.optimizers.legacy.Adam` resolves to another name and is left alone.
    return list(facts.called(owner, "tensorflow." + owner))


def _finding(call: Call, keyword: ast.keyword, owner: str, facts: Facts) -> Finding:
    name = keyword.arg or ""
    span = facts.span(keyword)
    shown = owner.removeprefix("keras.")
    right = _NEW_ARGUMENT_NAMES.get(name)
    message = f"`{shown}` has no argument `{name}` in Keras 3: the call fails{strike(facts, call)}"
    if right:
        edit = Edit(Span(span.line, span.column, span.line, span.column + len(name)), right)
        return Finding(
            span, "error", message, f"write `{right}=`", Fix(f"rename to `{right}`", (edit,), "safe")
        )
    hint = (
        "set `workers` and `use_multiprocessing` on the `PyDataset` instead"
        if name in ("workers", "use_multiprocessing", "max_queue_size")
        else f"leave `{name}` out"
    )
    return Finding(span, "error", message, hint, drop_argument(keyword, facts, "unsafe"))


REMOVED_DATA_API = Rule("BY206", "removed-data-api", "a name that NumPy, pandas or Pillow no longer has")

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
# How users write the module.
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
_DATA_REPLACEMENTS = {
    "append": "`pd.concat([df, other])`",
    "as_matrix": "`.to_numpy()`",
    "iteritems": "`.items()`",
    "applymap": "`.map(...)`",
    "ix": "`.loc` or `.iloc`",
    "get_value": "`.at[...]`",
    "mad": "`(df - df.mean()).abs().mean()`",
}


def find_removed_data_api(facts: Facts, target: Target) -> Iterator[Finding]:
    """Removed names, then removed methods on what surely is a frame."""
    if facts.packages & {"numpy", "PIL", "pandas"}:
        for use in removed_uses(facts, target, ("numpy", "pandas", "pillow")):
            if use.hide(REMOVED_DATA_API.code, facts):
                span = facts.span(use.node)
                yield Finding(span, "error", use.message(facts), _hint(use.name), _fix(use, facts))
    if "pandas" in facts.packages:
        methods = removed()["pandas"]["methods"]["pandas.DataFrame"]
        for method in methods.keys() & facts.calls.keys():
            for call in facts.calls[method]:
                if _on_frame(call, facts) and meets(call.block, "pandas", methods[method], facts, target):
                    message = f"`DataFrame.{method}` is gone from pandas: AttributeError{strike(facts, call)}"
                    yield Finding(
                        facts.span(call.node.func),
                        "error",
                        message,
                        _DATA_REPLACEMENTS.get(method, "see the pandas release notes"),
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
        module = facts.text(node.value)
        text = _SAFE.get(use.name) or f"{module}.{_MEMBERS[use.name]}"
        edits.append(Edit(facts.span(node), text))
    return Fix(f"write `{edits[0].text}`", tuple(edits), "safe")


REMOVED_TORCH_API = Rule("BY207", "removed-torch-api", "a name or an argument that PyTorch no longer has")

_TORCH_REPLACEMENTS = {
    "torch._six": "`math.inf` for `inf`, `collections.abc` for `container_abcs`, `str` for `string_classes`",
    "torch.symeig": "`torch.linalg.eigh`",
    "torch.eig": "`torch.linalg.eig`",
    "torch.lstsq": "`torch.linalg.lstsq`, with its arguments the other way round",
    "torch.solve": "`torch.linalg.solve`, with its arguments the other way round",
    "torch.matrix_rank": "`torch.linalg.matrix_rank`",
    "torch.rfft": "`torch.fft.rfft`, which returns complex numbers",
    "torch.irfft": "`torch.fft.irfft`, which takes complex numbers",
    "torch.set_deterministic": "`torch.use_deterministic_algorithms`",
}


def find_removed_torch_api(facts: Facts, target: Target) -> Iterator[Finding]:
    """Removed names through imports and attributes, then removed arguments."""
    if "torch" not in facts.packages:
        return
    for use in removed_uses(facts, target, ("torch",)):
        if use.hide(REMOVED_TORCH_API.code, facts):
            hint = _TORCH_REPLACEMENTS.get(use.name, "PyTorch's release notes name the successor")
            yield Finding(facts.span(use.node), "error", use.message(facts), hint)
    table = removed()["torch"]
    for owner, keywords in table["keywords"].items():
        for call in facts.called(owner):
            for keyword in gone_arguments(call, "torch", keywords, facts, target):
                name = keyword.arg or ""
                message = (
                    f"`{owner.rpartition('.')[2]}` has no argument `{name}` any more: not in torch {keywords[name]} "
                    f"nor later (tried in {table['version']}); TypeError{strike(facts, call)}"
                )
                fix = drop_argument(keyword, facts, "safe")
                hint = f"leave `{name}` out"
                if name == "verbose":
                    hint = "leave it out; `scheduler.get_last_lr()` returns the learning rate"
                yield Finding(facts.span(keyword), "error", message, hint, fix)


HISTORY_KEY = Rule("BY204", "history-key", "a key that the training history does not have")

_SHORT = {"acc": "accuracy", "val_acc": "val_accuracy"}
_VALIDATION = frozenset({"validation_data", "validation_split"})
# Where validation data would stand without its name.
_FITS = {"fit": (6,), "fit_generator": (5,)}
_LONG = {"accuracy": "acc", "val_accuracy": "val_acc"}


def find_history_key(facts: Facts, target: Target) -> Iterator[Finding]:
    """Subscripts of a history whose key is the other spelling of the compiled metric."""
    if not uses_keras(facts) or not facts.keys.keys() & (_SHORT.keys() | _LONG.keys()):
        return
    spellings = _compiled_metrics(facts)
    if spellings == {"accuracy"}:
        wrong = _SHORT
    elif spellings == {"acc"}:
        wrong = _LONG
    else:
        return
    for key, right in wrong.items():
        for seen in facts.keys.get(key, ()):
            if (
                _is_history(seen, facts)
                and isinstance(seen.node.ctx, ast.Load)
                and not _reached_never(seen, facts)
                and not is_guarded(seen.block)
            ):
                yield _history_key_finding(seen, key, right, facts)


def _compiled_metrics(facts: Facts) -> set[str]:
    """The spellings of accuracy in every `compile`; something unreadable among them makes the answer unknown."""
    found: set[str] = set()
    for call in facts.calls.get("compile", ()):
        metrics = call.keyword("metrics") or (call.node.args[2] if len(call.node.args) > 2 else None)
        if metrics is None:
            continue
        if not isinstance(metrics, ast.List | ast.Tuple) or not all(
            isinstance(item, ast.Constant) for item in metrics.elts
        ):
            return set()
        found |= {literal(item) for item in metrics.elts} & {"acc", "accuracy"}
    return found


def _is_history(seen: Seen, facts: Facts) -> bool:
    value = seen.node.value
    if isinstance(value, ast.Attribute) and value.attr == "history":
        return True
    values = facts.values(value, seen.block)
    return bool(values) and all(isinstance(item, ast.Attribute) and item.attr == "history" for item in values)


def _reached_never(seen: Seen, facts: Facts) -> bool:
    function = seen.block.function()
    return function.kind == "function" and function.scope.name not in facts.calls


def _history_key_finding(seen: Seen, key: str, right: str, facts: Facts) -> Finding:
    span = facts.span(seen.node.slice)
    quoted = facts.document.text(span)
    validated = _validated(facts) if key.startswith("val_") else "always"
    fix = None
    if quoted[1:-1] == key and len(quoted) == len(key) + 2 and validated != "never":
        edit = Edit(Span(span.line, span.column + 1, span.end_line, span.end_column - 1), right)
        fix = Fix(f"use `{right}`", (edit,), "safe" if validated == "always" else "unsafe")
    hint = f"use `{right}`"
    if validated == "never":
        hint = f"give `fit` its `validation_data`, then use `{right}`: without it the history has neither"
    message = (
        f"the history has no `{key}`: `compile` asks for `{right.removeprefix('val_')}`; "
        f"KeyError{strike(facts, seen)}"
    )
    return Finding(span, "error", message, hint, fix)


def _validated(facts: Facts) -> str:
    """Whether the trainings here validate: only then does the history have any `val_` key."""
    fits = [(call, *_FITS[name]) for name in _FITS for call in facts.calls.get(name, ())]
    given = [
        bool({word.arg for word in call.node.keywords} & _VALIDATION)
        or call.has_unknown_keywords
        or len(call.node.args) > position
        for call, position in fits
    ]
    if not given:
        return "perhaps"  # fitted elsewhere
    return "always" if all(given) else "perhaps" if any(given) else "never"
