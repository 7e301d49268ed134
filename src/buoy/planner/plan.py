"""`buoy.plan`: from a model (or the code that builds one) to the answer for each place asked about."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from buoy.errors import UsageError
from buoy.estimate.batch import largest_batch, starting_sizes
from buoy.estimate.child import LIVE, EstimateError, Request
from buoy.estimate.result import estimate
from buoy.estimate.trace import Trace
from buoy.planner.remedies import allocator_of, find_remedies
from buoy.planner.result import FITS, NOT, TIGHT, UNKNOWN, Answer, Plan, Remedy
from buoy.planner.session import PROCESS_CPU, Session, Wishes, held, host_ram, needs, step_seconds
from buoy.planner.targets import THIS, Target, next_tier, targets
from buoy.planner.traces import Workshop
from buoy.units import format_bytes

Say = Callable[[str], None]
REMEDY_SECONDS = 120.0
"""How long remedies are tried that nobody asked for."""


def plan(
    model: Any,
    batch: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    *,
    on: str | Sequence[str] = THIS,
    batch_size: int | None = None,
    remedies: bool | None = None,
    say: Say = lambda text: None,
    **session: Unpack[Wishes],
) -> Plan:
    """Whether a training step fits, with how many bytes, and what makes it fit; nothing is trained.

    `model` and `batch` are objects of this process, or `model` is the name of a function that returns both, in a file
    (`"train.py:build"`). The optimizer may be a class; without it AdamW is assumed, without a loss the model's own
    or cross-entropy. `remedies=True` tries them also where everything fits; `say=print` tells what is being done.
    What may be said about the session (`data="20GB"`, `in_memory=True`, `workers=2`, `steps=50_000`,
    `step_time="0.4s"`) is in `buoy explain plan`.

    >>> import torch, buoy
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    >>> plan = buoy.plan(model, (torch.zeros(64, 256), torch.zeros(64, dtype=torch.long)), on="colab-t4")
    >>> plan.fits
    True
    """
    names = [on] if isinstance(on, str) else list(on)
    request, live, words = _source(model, batch, optimizer, loss)
    with ExitStack() as stack:
        if request is None:  # a Keras model of this process: saved, as TensorFlow cannot be forked
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="buoy-plan-"))
            request = _saved_keras(model, batch, folder)
        if batch_size is not None:
            request = replace(request, batch=batch_size)
        workshop = stack.enter_context(Workshop(live))
        places, wishes = targets(names), Session.of(session)
        return make_plan(workshop, request, words, places, wishes, remedies=remedies, say=say)


def make_plan(
    workshop: Workshop,
    request: Request,
    source: str,
    places: Sequence[Target],
    session: Session,
    *,
    remedies: bool | None = None,
    say: Say = lambda text: None,
) -> Plan:
    """The plan for a request; `say` hears what is being done."""
    answers = []
    flops = None
    for place in places:
        say(f"tracing a step for {place.words}")
        here = replace(request, device=place.device.id)
        trace = workshop.trace(here)
        if flops is None:
            flops = workshop.flops(replace(here, batch=_size(trace, here)))
        answers.append(_answer(workshop, here, trace, place, session, flops, say))
    found: tuple[Remedy, ...] = ()
    cheapest = tried = None
    needy = next((answer for answer in answers if answer.memory_verdict in (TIGHT, NOT)), None)
    if remedies or (remedies is None and needy is not None):
        chosen = needy or answers[0]
        here = replace(request, device=chosen.target.device.id)
        tried = chosen.target.id
        limit = None if remedies else REMEDY_SECONDS
        known = f"{tried}: {chosen.memory_verdict}, peak {format_bytes(chosen.peak.likely)}"
        found, cheapest = find_remedies(
            workshop,
            here,
            chosen,
            capacity(chosen.target),
            lambda text: say(f"{known}; {text}"),
            flops,
            limit,
            session,
        )
    dearer = None
    if len(places) == 1 and tried is not None:
        better = next_tier(places[0])
        if better is not None:
            there = replace(request, device=better.device.id)
            dearer = _answer(workshop, there, workshop.trace(there), better, session, flops, say, split=False)
    first = answers[0].estimate.trace
    return Plan(
        source=source,
        batch=_size(first, request),
        answers=tuple(answers),
        remedies=found,
        cheapest=cheapest,
        remedies_for=tried,
        next_tier=dearer,
        notes=tuple(dict.fromkeys(note for answer in answers for note in answer.estimate.notes)),
        facts={
            **first.facts,
            "traces": workshop.traces,
            "flops": flops,
            "autocast": request.autocast,
            "accumulate": request.accumulate,
        },
    )


def capacity(place: Target) -> int | None:
    """Bytes that the training can have of the device: on a CPU less what the process itself takes."""
    if place.memory is None or not place.is_cpu:
        return place.memory
    return max(0, place.memory - PROCESS_CPU[1])


def _answer(
    workshop: Workshop, request: Request, trace: Trace, place: Target, session: Session,
    flops: dict[str, float] | None, say: Say, *, split: bool = True,
) -> Answer:  # fmt: skip
    figure = estimate(trace, place.device, allocator=allocator_of(request, place.device))
    verdict = figure.verdict(capacity(place))
    size = _size(trace, request)
    most = micro = None
    why = (
        "its tensors share no first dimension: the number of samples cannot be varied" if size is None else ""
    )
    if size is not None and capacity(place) is not None:
        say(f"{place.words}: {verdict}; seeking the largest batch")
        try:
            most = _largest(workshop, request, place, session, known={size: trace})
        except EstimateError as error:  # a batch whose size the code fixes itself
            why = f"the step does not run with another number of samples ({_first_words(error)})"
        if verdict == FITS and (not place.is_cpu or most is None or most >= size):
            micro = size
        elif most is not None and split:
            # Gradients of the earlier pieces stay while the next one runs: less fits than in one piece.
            kept = held(trace, "weights") if request.framework == "keras" else 0
            pieces = replace(request, accumulate=max(2, request.accumulate)) if not kept else request
            known = {size: trace} if pieces is request else None
            micro = _even(size, _or_none(partial(_largest, workshop, pieces, place, session, kept, known)))
    seconds: tuple[float, float] | None
    if session.step_seconds is not None:
        seconds, basis = (session.step_seconds, session.step_seconds), "as given"
    else:
        seconds, basis = step_seconds(place.device, flops, request.autocast)
    around = needs(session, place, trace, seconds, figure.reserved)
    memory = capacity(place)
    decided = None if memory is None else figure.needed(memory)
    if decided is not None and place.memory is not None and memory is not None:
        decided += place.memory - memory
    return Answer(place, figure, verdict, most, micro, around, seconds, basis, why, decided)


def _largest(
    workshop: Workshop,
    request: Request,
    place: Target,
    session: Session,
    taken: int = 0,
    known: dict[int, Trace] | None = None,
) -> int:
    """The largest batch that fits next to so many bytes; `known` are traces that need not be made.

    On a CPU it is the largest whose whole process fits, with what the session holds in the same RAM.
    """
    known = known or {}
    memory = capacity(place)
    assert memory is not None

    def trace_at(size: int) -> Trace:
        return known[size] if size in known else workshop.trace(replace(request, batch=size))

    def fits(trace: Trace) -> bool:
        figure = estimate(trace, place.device, allocator=chosen)
        if figure.verdict(memory - taken) != FITS:
            return False
        return not place.is_cpu or host_ram(session, place, trace, figure.reserved).verdict in (FITS, UNKNOWN)

    start = starting_sizes(next(iter(known), None))
    chosen = allocator_of(request, place.device)
    workshop.prepare([replace(request, batch=size) for size in start if size not in known])
    return largest_batch(trace_at, fits, start=start)


def _or_none(find: Callable[[], int]) -> int | None:
    try:
        return find()
    except EstimateError:
        return None  # gradients cannot be gathered over pieces of it


def _first_words(error: EstimateError) -> str:
    return (error.received or error.message).split("; ")[0].splitlines()[0][:160]


def _even(size: int, most: int | None) -> int | None:
    """The batch in equal pieces, each no larger than `most`.

    >>> _even(100, 60), _even(100, 0)
    (50, 0)
    """
    return most if not most else math.ceil(size / math.ceil(size / most))


def _size(trace: Trace, request: Request) -> int | None:
    found = trace.facts.get("batch")
    return int(found) if found is not None else request.batch


def _source(
    model: Any, batch: Any, optimizer: Any, loss: Any
) -> tuple[Request | None, Callable[[], Any] | None, str]:
    """The request, what gives the objects of this process, and how to call it all."""
    if isinstance(model, (str, os.PathLike)):
        return parse_source(os.fspath(model)), None, os.fspath(model)
    if _is_keras(model):
        return None, None, type(model).__name__
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise UsageError(
            "cannot plan for this", received=type(model).__name__,
            expected="a torch.nn.Module, a Keras model, or `\"train.py:build\"`",
        )  # fmt: skip
    if batch is None:
        raise UsageError(
            "a model alone is not enough",
            received="no batch",
            expected="a sample batch too, such as (images, labels)",
            hint="buoy.plan(model, next(iter(loader)))",
        )

    def live() -> dict[str, Any]:
        # In the forked child only: what an optimizer has gathered so far is gathered from the start on fake tensors.
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.state.clear()
        model.zero_grad(set_to_none=True)
        given = {"model": model, "batch": batch, "optimizer": optimizer, "loss": loss}
        return {name: value for name, value in given.items() if value is not None}

    return Request("torch", {"build": f"{LIVE}:build"}), live, type(model).__name__


def parse_source(text: str, framework: str = "torch") -> Request:
    """`train.py:build` or `package.module:build`, as a request.

    >>> parse_source("project.models:build").source
    {'build': 'project.models:build'}
    """
    path, separator, name = text.rpartition(":")
    if not separator or not path or not name.isidentifier():
        raise UsageError(
            "cannot read what to plan",
            received=repr(text),
            expected="a file and a function in it: `train.py:build`",
        )
    if path.endswith(".py") and not os.path.exists(path):
        raise UsageError("no such file", received=path, expected="a Python file with a build function")
    _must_define(path if path.endswith(".py") else path.replace(".", os.sep) + ".py", name)
    return Request(framework, {"build": text})


def _must_define(path: str, name: str) -> None:
    """Look for the name by reading: to run a whole script, only to find that it has no such function, is too late."""
    import ast
    import symtable

    try:
        with open(path, "rb") as file:
            source = file.read()
        tree, table = ast.parse(source), symtable.symtable(source.decode(), path, "exec")
    except (OSError, SyntaxError, ValueError):
        return  # a module from elsewhere, or one that cannot be read: importing it says more
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)):
        return  # what that brings is known only by running it
    symbols = table.get_symbols()
    if any(found.get_name() == name and (found.is_assigned() or found.is_imported()) for found in symbols):
        return
    from difflib import get_close_matches

    functions = [found.get_name() for found in symbols if found.is_namespace()]
    near = get_close_matches(name, functions, n=1)
    raise UsageError(
        f"{path} has no function `{name}`",
        received=", ".join(functions) or "no functions",
        expected="a function that returns a model and a batch",
        hint=f"did you mean `{path}:{near[0]}`?"
        if near
        else f"`buoy plan {path}` plans it as a training script",
    )


def _is_keras(model: Any) -> bool:
    return any(base.__module__.split(".")[0] == "keras" for base in type(model).__mro__)


def _saved_keras(model: Any, batch: Any, folder: str) -> Request:
    path = os.path.join(folder, "model.keras")
    try:
        model.save(path)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        raise EstimateError(
            "the Keras model cannot be handed to the tracing process",
            received=f"{type(error).__name__}: {error}",
            expected="a model that `model.save` can write",
            hint='plan from a function instead: `buoy.plan("train.py:build")`',
        ) from None
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    shape = getattr(first, "shape", None)
    source = {"keras": path, "parts": _parts(batch)}
    return Request("keras", source, batch=int(shape[0]) if shape and shape[0] else None)


def _parts(batch: Any) -> list[tuple[list[int | None], str]] | None:
    """One sample's shape and type of (x, y) or (x, y, weights): labels are not always as the output is."""
    if not isinstance(batch, (tuple, list)) or not 2 <= len(batch) <= 3:
        return None
    if not all(getattr(part, "shape", None) and hasattr(part, "dtype") for part in batch):
        return None
    return [(list(part.shape[1:]), str(getattr(part.dtype, "name", part.dtype))) for part in batch]
