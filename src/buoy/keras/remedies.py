"""Remedies applied to a Keras model about to be traced, as a person would apply them; runs in a tracing child."""

from __future__ import annotations

from typing import Any

import keras

from buoy.estimate.request import EstimateError
from buoy.estimate.siblings import Sibling, smaller


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
