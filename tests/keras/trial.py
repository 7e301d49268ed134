"""One trial: a training that is never killed, the same one killed and run again, and what differs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import Server

Live = Callable[..., dict[str, Any]]

# kind -> the steps after which it is killed, one attempt each (step 14 is the last of the second epoch)
KILLS = {
    "arrays": [5, 14],
    "pipeline-twice": [11],
    "pipeline-random": [11],
    "pydataset-processes": [11],
    "generator": [11],
    "mixed": [11],
    "loop": [11],
    "shrunk": [8],
    "mirrored": [11],
}
# These take as long again: `python -m tests.keras` tries them too.
MORE_KILLS = {
    "arrays-batch": [8],
    "arrays-steps": [9],
    "pipeline": [5, 14],
    "pipeline-repeat": [11],
    "pipeline-interleaved": [11],
    "pipeline-sampled": [11],
    "pipeline-unknown": [10],
    "pydataset": [13],
    "pydataset-threads": [11],
    "loader": [11],
    "loop-shrunk": [8],
    "mirrored-pipeline": [11],
}


@contextmanager
def nursery() -> Iterator[Live]:
    """Gives a function that lives a life in a process of its own; all of them share one start of TensorFlow."""
    server = Server("tests.keras.nursery")
    yield lambda *request: dict(server.ask(request))
    server.stop()


def differences(live: Live, folder: Path, kind: str, kills: Sequence[int]) -> list[str]:
    """Every variable after every step, every loss, the history and the final state; empty when all are equal."""
    whole, killed = folder / "whole", folder / "killed"
    lives = [live("training", whole, kind)]
    lives += [live("training", killed, kind, step) for step in kills]
    lives.append(live("training", killed, kind))
    endings = [lived["status"] for lived in lives]
    if endings != [0, *[signal.SIGKILL] * len(kills), 0]:
        return [f"they ended with {endings}", *(lived["said"] for lived in lives)]
    return compare(whole, killed, most_repeated=3 * len(kills))


def compare(whole: Path, killed: Path, most_repeated: int) -> list[str]:
    """What the log of a killed training has that the other's has not."""
    expected, found = lines(whole), lines(killed)
    steps = {line["step"]: line for line in expected if "step" in line}
    words = [
        f"{line} instead of {steps[line['step']]}"
        for line in found
        if line != steps.get(line.get("step"), line)
    ]
    if found[-1] != expected[-1]:
        words.append(f"in the end {found[-1]} instead of {expected[-1]}")
    made = {line["step"] for line in found if "step" in line}
    if made != steps.keys():
        words.append(f"steps {sorted(steps.keys() - made)} were not made")
    if len(found) - len(expected) > most_repeated:
        words.append(f"{len(found) - len(expected)} steps were made twice")
    return words


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{folder}.log").read_text().splitlines()]
