"""From what the user gave (a build function, a config) to one training step: no weights, no download."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from buoy._compat import patched
from buoy._compat.torch import original_module, tree_flatten, tree_map
from buoy._compat.transformers import built_from_config
from buoy.estimate.child import WRITE_BUILD, EstimateError, Request, load
from buoy.estimate.tracing import remedies
from buoy.estimate.tracing.fake import StayOnHost, parameters_on_meta, shape_lazy_modules, without_bytes
from buoy.estimate.tracing.loss import (
    MODELS,
    OUTPUTS,
    EitherWay,
    call_model,
    inputs_of,
    modules_of_loss,
    of_output,
    target_of,
)
from buoy.estimate.tracing.remedies import apply, remember_code
from buoy.estimate.tracing.steps import Job, Loss

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = partial(torch.optim.Adafactor, lr=1e-3)
KEYS = ("model", "batch", "optimizer", "loss")
_OURS = ("turns", "notes")  # what a script's rehearsal adds
EXPECTED = (
    "a model and a batch, and optionally an optimizer and a loss: `return model, batch, optimizer, loss`"
)


def build(request: Request, *, lazily: bool = True) -> Job:
    """The job a request describes. Lazily: parameters are never allocated."""
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager_instead_of_compiled(notes))
        if lazily:
            stack.enter_context(parameters_on_meta())
            stack.enter_context(StayOnHost())
        if "build" in request.source:
            job = _from_function(request.source["build"], notes)
        else:
            length = int(request.source.get("seq", 512))
            job = from_config(request.source["hf_config"], length, notes)
    if isinstance(job.loss, EitherWay):
        job.loss = job.loss.decided(job.model, job.batch, job.loss_modules)
    if lazily:
        shape_lazy_modules(job.model, lambda: job.loss(job.model, tree_map(without_bytes, job.batch)))
    job.model = _unwrapped(job.model, notes)
    if request.optimizer:
        job.optimizer = _named_optimizer(request.optimizer)
        for turn in job.turns:
            turn.optimizer = job.optimizer([p for g in turn.optimizer.param_groups for p in g["params"]])
    if request.checkpointing:
        remember_code(job, "checkpointing", _checkpoint(job.model))
    if request.batch is not None:
        job.batch = resized(job.batch, request.batch)
    apply(job, request.changes)
    return job


def batch_size(batch: Any) -> int | None:
    """The samples in a batch: the first dimension its tensors share; None if they share none."""
    sizes = [
        leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    return int(sizes[0]) if sizes and all(size == sizes[0] for size in sizes) else None


def resized(batch: Any, size: int) -> Any:
    """The batch with another number of samples."""
    now = batch_size(batch)
    if now is None:
        raise EstimateError(
            "cannot change the batch size",
            received=f"a batch of {shapes(batch)}",
            expected="tensors that share their first dimension",
            hint="return the batch with the wanted size from build()",
        )

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)

    return tree_map(resize, batch)


def shapes(batch: Any) -> str:
    """The shapes and dtypes of its tensors.

    >>> shapes((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)))
    '2x3 float32, 2 int64'
    """
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(
        f"{'x'.join(map(str, leaf.shape)) or 'scalar'} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in leaves
    )


def _from_function(target: str, notes: list[str]) -> Job:
    path, _, name = target.rpartition(":")
    function = load(path, name)
    given = function()
    parts = _by_kind(given, target)
    model, batch = parts.get("model"), parts.get("batch")
    if not isinstance(model, torch.nn.Module) or batch is None:
        raise EstimateError(
            f"{name}() did not return a model and a batch", received=_describe(given), expected=EXPECTED,
            hint="for example `return model, (images, labels)`",
        )  # fmt: skip
    batch = _sample(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(batch)[0]):
        raise EstimateError(
            "the batch holds no tensor",
            received=_describe(batch),
            expected="tensors, in tuples, lists or dicts",
        )
    if batch_size(batch) == 0:
        raise EstimateError(
            "the batch is empty", received=shapes(batch), expected="at least one sample",
            hint="is the data set empty here? Tensors of zeros will do: `torch.zeros(64, 3, 224, 224)`",
        )  # fmt: skip
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise EstimateError(
            "nothing to train",
            received=f"{type(model).__name__} without a parameter that requires a gradient",
            expected="a model with something to train",
        )
    model.train()
    _refuse_what_is_neither(parts.get("optimizer"), parts.get("loss"))
    optimizer = _dense(model, parts.get("optimizer"), notes)
    if optimizer is None:
        notes.append("no optimizer was given: AdamW assumed")
        optimizer = OPTIMIZERS["AdamW"]
    notes += parts.get("notes", [])
    job = Job(model, batch, _loss(parts.get("loss"), notes), optimizer, notes, parts.get("turns", []))
    if "turns" not in parts:  # a script's rehearsal has found them itself
        job.loss_modules = modules_of_loss(parts.get("loss"), model)
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in own for module in job.loss_modules for parameter in module.parameters()):
            names = ", ".join(dict.fromkeys(type(module).__name__ for module in job.loss_modules))
            notes.append(f"the loss brings weights of its own along ({names}): counted as held on the device")
    return job


def _by_kind(given: Any, target: str) -> dict[str, Any]:
    if isinstance(given, dict):
        _know_all(given)
        return given
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 4:
        raise EstimateError(f"{target} returned nonsense", received=_describe(given), expected=EXPECTED)
    parts: dict[str, Any] = {"model": given[0], "batch": given[1]}
    rest = list(given[2:])
    if len(rest) == 2:  # in this order, unless the kinds say otherwise: a function may make an optimizer
        turned = _is_optimizer(rest[1]) and not _is_optimizer(rest[0])
        turned |= isinstance(rest[0], torch.nn.Module) and not isinstance(rest[1], torch.nn.Module)
        turned |= rest[1] is None and not _is_optimizer(rest[0])
        loss, optimizer = rest if turned else reversed(rest)
        return parts | {"optimizer": optimizer, "loss": loss}
    return parts | {"optimizer" if _is_optimizer(item) else "loss": item for item in rest}


def _is_optimizer(item: Any) -> bool:
    kind = item.func if isinstance(item, partial) else item
    return isinstance(kind, torch.optim.Optimizer) or (
        inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    )


def _refuse_what_is_neither(optimizer: Any, loss: Any) -> None:
    """What cannot be one would be left out, or replaced by what is assumed without it."""
    if optimizer is not None and not _is_optimizer(optimizer) and not _is_function(optimizer):
        raise EstimateError(
            "the given optimizer is not an optimizer", received=_describe(optimizer),
            expected="an optimizer, its class, or a function of the weights that returns one",
            hint="a script with several optimizers is planned whole: `buoy plan train.py`",
        )  # fmt: skip
    if loss is not None and (_is_optimizer(loss) or not callable(loss)):
        raise EstimateError(
            "the given loss is not a loss function", received=_describe(loss),
            expected="a module or function of (output, target), or a function of (model, batch)",
            hint="a script with several optimizers is planned whole: `buoy plan train.py`"
            if _is_optimizer(loss) else "for example `nn.CrossEntropyLoss()`",
        )  # fmt: skip


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module)


def _dense(model: torch.nn.Module, optimizer: Any, notes: list[str]) -> Any:
    """Sparse gradients hold as many rows as a batch has: no tracer can know. Counted as dense, which is the most."""
    sparse = [module for module in model.modules() if getattr(module, "sparse", False) is True]
    if not sparse:
        return optimizer
    for module in sparse:
        module.sparse = False  # type: ignore[assignment]
    notes.append(
        f"sparse gradients ({', '.join(dict.fromkeys(type(module).__name__ for module in sparse))}) are counted as "
        "dense ones: the real peak is lower"
    )
    kind = optimizer if inspect.isclass(optimizer) else type(optimizer)
    return OPTIMIZERS["Adam"] if kind is torch.optim.SparseAdam else optimizer


def _know_all(given: dict[Any, Any]) -> None:
    """A misspelt name would silently be replaced by what is assumed without it."""
    unknown = [str(name) for name in given if name not in (*KEYS, *_OURS)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], KEYS, 1)
        raise EstimateError(
            "the build function returned a dict with a name that is not known", received=f"`{unknown[0]}`",
            expected=", ".join(f"`{name}`" for name in KEYS), hint=f"did you mean `{near[0]}`?" if near else None,
        )  # fmt: skip


def _loss(given: Any, notes: list[str]) -> Loss:
    if given is None:
        notes.append("no loss was given: the model's own, or cross-entropy, assumed")
        return _assumed_loss
    names = [] if isinstance(given, torch.nn.Module) else list(inspect.signature(given).parameters)
    if len(names) < 2 or names[0] in OUTPUTS:
        return partial(of_output, given)
    if names[0] in MODELS or names[1] == "batch":
        return given  # type: ignore[no-any-return]
    return EitherWay(given)


def _assumed_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        out = model(**batch)
        loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        if loss is None:
            raise EstimateError(
                "the model returned no loss", received=_describe(out), expected="`loss` in its output",
                hint="put `labels` into the batch, or return a loss function from build()",
            )  # fmt: skip
        return loss  # type: ignore[no-any-return]
    out, target = call_model(model, inputs_of(batch)), target_of(batch)
    if isinstance(target, torch.Tensor) and not target.is_floating_point() and out.dim() > 1:
        return torch.nn.functional.cross_entropy(out, target)
    if isinstance(target, torch.Tensor) and target.shape == out.shape:
        return torch.nn.functional.mse_loss(out, target)
    return out.float().mean()  # type: ignore[no-any-return]


def _sample(batch: Any) -> Any:
    return next(iter(batch)) if isinstance(batch, torch.utils.data.DataLoader) else batch


def _named_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    found = OPTIMIZERS.get(name)
    if found is None:
        raise EstimateError("no such optimizer", received=repr(name), expected=", ".join(OPTIMIZERS))
    return found


def _unwrapped(model: torch.nn.Module, notes: list[str]) -> torch.nn.Module:
    inner = original_module(model)
    if isinstance(inner, torch.nn.Module):
        notes.append("the model is compiled: estimated as if it were not")
        return inner
    return model


def _checkpoint(model: torch.nn.Module) -> str:
    """Recompute each of the repeated blocks, or use the model's own switch if it has one; returns the code for it."""
    from torch.utils.checkpoint import checkpoint

    switch = getattr(model, "gradient_checkpointing_enable", None)
    if switch is not None:
        switch(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    blocks = [
        child
        for part in model.modules()
        if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential))
        for child in part
        if sum(type(other) is type(child) for other in part) > 1 and any(True for _ in child.children())
    ]
    inside = {id(deep) for block in blocks for deep in list(block.modules())[1:]}
    outermost = [block for block in blocks if id(block) not in inside]
    if not outermost:
        raise EstimateError(
            "nothing to checkpoint", received=type(model).__name__, expected="a model of repeated blocks"
        )
    for block in outermost:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return remedies.checkpointing(model, outermost)


@contextlib.contextmanager
def eager_instead_of_compiled(notes: list[str]) -> Iterator[None]:
    """Nothing is compiled, as it is estimated eager; `notes` say so."""

    def eager(model: Any = None, **_: Any) -> Any:
        if model is None:
            return lambda function: eager(function)
        if "the model is compiled: estimated as if it were not" not in notes:
            notes.append("the model is compiled: estimated as if it were not")
        return model

    with patched(torch, "compile", eager):
        yield


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_SPANS = ("ForQuestionAnswering",)
_SIDE = 224


def from_config(path: str, length: int, notes: list[str]) -> Job:
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
    model = _with_head(config, named, notes)
    model.train()
    batch, words = _sample_of(model, config, length, notes)
    notes.append(f"{type(model).__name__} with {words}; AdamW assumed")

    def loss(model: Any, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(**batch).loss
        return result

    return Job(model, batch, loss, OPTIMIZERS["AdamW"], notes)


def _with_head(config: Any, named: str | None, notes: list[str]) -> Any:
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
            hint=WRITE_BUILD,
        ) from None
    if named is not None:
        notes.append(
            f"the config names {named}, which has no loss of its own: planned as a language model instead"
        )
    return model


def _sample_of(model: Any, config: Any, length: int, notes: list[str]) -> tuple[dict[str, torch.Tensor], str]:
    """One sample of what the model takes, and what to call it."""
    name = model.main_input_name
    tokens = torch.zeros((1, length), dtype=torch.long)
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise EstimateError(
            "this config is of a model with several kinds of input",
            received=type(model).__name__,
            expected="a model of text, of images or of sounds",
            hint=WRITE_BUILD,
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
            "the config does not say which inputs this model takes",
            received=f"{type(model).__name__} with `{name}`",
            expected="`input_ids`, `pixel_values` or `input_features`",
            hint=WRITE_BUILD,
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
    """Learned positions end where their table does; computed ones continue, untrained."""
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
