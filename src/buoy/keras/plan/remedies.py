"""Remedies applied to a Keras model about to be traced, as a person would apply them; runs in a tracing child."""

from __future__ import annotations

from typing import Any

import keras

from buoy._compat.keras import layers_of
from buoy.estimate.child import EstimateError
from buoy.estimate.siblings import Sibling, smaller


def apply(name: Any, model: Any, batch: Any) -> tuple[Any, Any, list[str]]:
    """The model and batch with a smaller "model" or "input", and what is to be said of it."""
    if name == "input":
        return *smaller_input(model, batch), []
    if name == "model":
        made, sibling = smaller_model(model)
        return made, batch, [f"{sibling} instead"]
    return model, batch, []


def code_of(batch: Any, said: list[str]) -> dict[str, str]:
    """What a person writes to have them: for the smaller batch, or the sibling that `apply` named."""
    import tensorflow as tf

    shape = tuple(tf.nest.flatten(batch)[0].shape[1:])
    cut = f"tokens = tokens[:, :{shape[0]}]" if shape else ""
    if len(shape) == 3:
        cut = (
            f"images = keras.ops.image.resize(images, {shape[:2]})   # and keras.Input({shape}) in the model"
        )
    found = {"smaller-input": cut}
    if said:
        name = said[0].split()[0]
        made = f"keras.applications.{name}(weights=None, include_top=False, input_shape={shape})"
        found["smaller-model"] = f"base = {made}   # your own layers follow"
    return found


def smaller_model(model: Any) -> tuple[Any, str]:
    """The model with its keras.applications part replaced by the next smaller sibling, and that sibling's name."""
    sibling = smaller("keras", model.name)
    made = _whole(model, sibling) if sibling is not None else None
    for layer in model.layers:
        inner = smaller("keras", layer.name) if made is None else None
        if inner is not None:
            sibling, made = inner, _with_part(model, layer, inner)
    if sibling is None or made is None:
        raise EstimateError("no smaller sibling is known")
    made.compile_from_config(model.get_compile_config())
    return made, sibling.name


def smaller_input(model: Any, batch: Any) -> tuple[Any, Any]:
    """The model rebuilt for inputs of half the side or length, and such a batch."""
    import tensorflow as tf

    sides: dict[int, int] = {}

    def halved(shape: Any, tokens: bool = False) -> list[Any]:
        first = 2 if len(shape) > 3 and keras.config.image_data_format() == "channels_first" else 1
        last = first + max(len(shape) - 2, 1 if tokens else 0)
        made = [
            max(1, side // 2) if side and first <= axis < last else side for axis, side in enumerate(shape)
        ]
        sides.update({side: half for side, half in zip(shape, made, strict=True) if half != side})
        return made

    def rebuilt(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("class_name") == "InputLayer":
                config = value["config"]
                tokens = "int" in str(config.get("dtype"))
                return {**value, "config": {**config, "batch_shape": halved(config["batch_shape"], tokens)}}
            # What a layer was built with follows from its input.
            return {name: rebuilt(part) for name, part in value.items() if name != "build_config"}
        return type(value)(map(rebuilt, value)) if isinstance(value, (list, tuple)) else value

    kinds = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    try:
        config = rebuilt(keras.saving.serialize_keras_object(model))
        if not sides:
            raise EstimateError("the inputs have no side or length")
        made = keras.saving.deserialize_keras_object(config, custom_objects=kinds)
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise EstimateError("the model cannot be built for smaller inputs", received=str(error)) from None
    if not made.compiled:
        made.compile_from_config(model.get_compile_config())

    def cut(leaf: Any) -> Any:
        shape = [leaf.shape[0], *(sides.get(side, side) for side in leaf.shape[1:])]
        return tf.zeros(shape, leaf.dtype) if shape != list(leaf.shape) else leaf

    return made, tf.nest.map_structure(cut, batch)


def _whole(model: Any, sibling: Sibling) -> Any:
    if len(model.output_shape) != 2:
        return _application(sibling, model.input_shape, include_top=False)
    return _application(sibling, model.input_shape, classes=model.output_shape[-1])


def _with_part(model: Any, base: Any, sibling: Sibling) -> Any:
    """The same layers around the smaller part."""
    pooling = "avg" if len(base.output_shape) == 2 else None

    def cloned(layer: Any) -> Any:
        if layer is not base:
            return layer.__class__.from_config(layer.get_config())
        made = _application(sibling, base.input_shape, include_top=False, pooling=pooling)
        made.trainable = base.trainable
        return made

    return keras.models.clone_model(model, clone_function=cloned)


def _application(sibling: Sibling, shape: Any, **options: Any) -> Any:
    try:
        return getattr(keras.applications, sibling.name)(weights=None, input_shape=shape[1:], **options)
    except (ValueError, TypeError) as error:
        raise EstimateError(f"{sibling.name} cannot take the model's place", received=str(error)) from None
