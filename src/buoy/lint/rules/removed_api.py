"""BY201: a name, module or method that Keras 3 or TensorFlow 2 no longer has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.frameworks import is_guarded, is_keras_model, uses_keras
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.removed import Use, removed_uses, strike
from buoy.lint.target import Target, removed

RULE = Rule("BY201", "removed-keras-api", "a name or method that Keras 3 or TensorFlow 2 no longer has")

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


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
                use.hide(RULE.code, facts)
            continue
        for use in (use for use in uses if use.hide(RULE.code, facts)):
            hint = _HINTS.get(use.name) or _compat_hint(use.name)
            yield Finding(facts.document.span(use.node), "error", use.message(facts), hint)
    methods = removed()["keras"]["methods"]["keras.Sequential"]
    for method in methods.keys() & facts.calls.keys():
        for call in facts.calls[method]:
            if (
                _is_model_method(call, facts)
                and not is_guarded(call.block)
                and target.lacks("keras", "3.0.0", facts)
            ):
                yield _method(call, facts)


def _group(use: Use) -> str:
    if use.library == "tensorflow":
        return "tensorflow"
    return "keras.backend" if use.name.startswith("keras.backend.") else use.name


def _together(group: str, uses: list[Use], facts: Facts) -> Finding:
    """One finding for code of another age: its names are gone all together, and are mended all together."""
    first = uses[0]
    what, hint = _GROUPS[group]
    shown = ", ".join(f"`{use.name}`" for use in uses[:3])
    when = strike(facts, first.block, getattr(first.node, "lineno", 1))
    tried = removed()[first.library]["version"]
    message = (
        f"{what}: {len(uses)} names it uses are gone ({shown}, ...; tried in {first.library} "
        f"{tried}); it fails here{when}"
    )
    return Finding(facts.document.span(first.node), "error", message, hint)


def _is_model_method(call: Call, facts: Facts) -> bool:
    if call.receiver is None:
        return False
    if call.tail not in _RENAMED and call.tail != "predict_classes":
        return is_keras_model(call.receiver, call.block, facts)
    # No other library in use has methods of these names; a class of the person's own may.
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
    span = facts.document.span(function)
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
    message = f"`{call.tail}` is gone from Keras models: AttributeError{strike(facts, call.block, call.node.lineno)}"
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
