"""A Hugging Face config as one training step: the model it names, with the inputs and labels which that one takes."""

from __future__ import annotations

import json
from typing import Any

import torch

from buoy._compat.transformers import built_from_config
from buoy.estimate.child import EstimateError
from buoy.estimate.tracing.steps import Job

_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_SPANS = ("ForQuestionAnswering",)
_HINT = "give a function that returns model and batch: `buoy plan train.py:build`"
_SIDE = 224


def from_config(path: str, length: int, optimizer: Any, notes: list[str]) -> Job:
    """The step of the model that a config.json describes, with one sample."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise EstimateError("transformers is not installed", hint="pip install transformers") from None
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    kind = record.pop("model_type", None)
    if kind is None:
        raise EstimateError(
            "not a model's config.json",
            received=f"{path} without `model_type`",
            expected="a Hugging Face config",
        )
    config = AutoConfig.for_model(kind, **record)
    config.use_cache = False
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 0  # which word a decoder begins with costs nothing
    named = next(iter(record.get("architectures") or ()), None)
    model = _made(config, named, notes)
    model.train()
    batch, words = _batch(model, config, length, notes)
    notes.append(f"{type(model).__name__} with {words}; AdamW assumed")

    def loss(model: Any, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(**batch).loss
        return result

    return Job(model, batch, loss, optimizer, notes)


def _made(config: Any, named: str | None, notes: list[str]) -> Any:
    """The model with the head that the config names: a classifier has no scores for every word."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    made: Any = getattr(transformers, named or "", None)
    if made is not None and named is not None and named.endswith((*_TOKENS, *_CLASSES, *_SPANS)):
        return built_from_config(made, config)
    try:
        model = auto.from_config(config)
    except ValueError:
        raise EstimateError(
            "no training step is known for this config",
            received=f"{named or config.model_type}, which has no loss of its own",
            expected="a model that computes its loss from labels, such as BertForSequenceClassification",
            hint=_HINT,
        ) from None
    if named is not None:
        notes.append(f"the config names {named}, which has no loss of its own: a language model in its stead")
    return model


def _batch(model: Any, config: Any, length: int, notes: list[str]) -> tuple[dict[str, torch.Tensor], str]:
    """One sample of what the model takes, and what it is in words."""
    name = model.main_input_name
    tokens = torch.zeros((1, length), dtype=torch.long)
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise EstimateError(
            "this config is of a model with several kinds of input",
            received=type(model).__name__,
            expected="a model of text, of images or of sounds",
            hint=_HINT,
        )
    if name == "pixel_values":
        given, words = _image(config)
        inputs = {name: given}
    elif name == "input_ids":
        inputs, words = {name: tokens}, f"sequences of {length} tokens"
        _must_have_positions(model, config, length, notes)
    elif (
        name == "input_features"
        and hasattr(config, "num_mel_bins")
        and hasattr(config, "max_source_positions")
    ):
        frames = 2 * config.max_source_positions
        inputs = {name: torch.zeros((1, config.num_mel_bins, frames))}
        words = f"{frames} frames of sound"
    else:
        raise EstimateError(
            "what this model takes is not known from its config",
            received=f"{type(model).__name__} with `{name}`",
            expected="`input_ids`, `pixel_values` or `input_features`",
            hint=_HINT,
        )
    labels, more = _labels(type(model).__name__, tokens)
    if name != "input_ids" and "labels" in labels and labels["labels"].dim() == 2:
        _must_have_positions(model, config, length, notes)
        more = f"labels of {length} tokens"
    return inputs | labels, f"{words}, {more}"


def _image(config: Any) -> tuple[torch.Tensor, str]:
    side = getattr(config, "image_size", None) or _SIDE
    high, wide = (side, side) if isinstance(side, int) else side
    return torch.zeros((1, getattr(config, "num_channels", 3), high, wide)), f"images of {high} x {wide}"


def _labels(kind: str, tokens: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    one = torch.zeros(1, dtype=torch.long)
    if kind.endswith(_SPANS):
        return {"start_positions": one, "end_positions": one.clone()}, "a span for each"
    if kind.endswith(_CLASSES):
        return {"labels": one}, "a class for each"
    return {"labels": tokens.clone()}, "labels as long"


def _must_have_positions(model: torch.nn.Module, config: Any, length: int, notes: list[str]) -> None:
    """Learned positions end where their table does; computed ones go on, untrained."""
    named = ("max_target_positions", "max_position_embeddings")
    known = next((size for size in (getattr(config, name, None) for name in named) if size), None)
    if not isinstance(known, int) or known < 1:
        return
    tables = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in model.named_modules()
        if isinstance(table, torch.nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    most = min([known, *tables])
    if tables and length > most:
        raise EstimateError(
            "the sequences are longer than the model has positions", received=f"{length} tokens",
            expected=f"at most {most:,}, the positions it learns", hint=f"`--seq {most}`",
        )  # fmt: skip
    if length > known:
        notes.append(f"sequences of {length} tokens are longer than the {known:,} the config names")
