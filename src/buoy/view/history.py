"""A run folder read for a view: its attempts in order, what was measured and adapted in each, and what is missing.

What it says may be passed on, so names of machines and folders are taken out of texts. Whether a recording still grows
is decided by its process, not by the age of its files, which a copy makes new.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from buoy.fields import count, mapping, mappings, number, text
from buoy.flight.alarms import stall
from buoy.flight.attempt import Attempt, attempt_numbers, attempts_of, is_kernel, missing_of
from buoy.flight.beacon import read_beacon
from buoy.flight.log import SAMPLES_MOST_BYTES, fields_of, measured, read_events, read_samples, sample_files
from buoy.flight.trainings import training_of
from buoy.machine.files import read_json, read_lines
from buoy.text import printable
from buoy.verdict.evidence import observe
from buoy.verdict.notebook import IDLE, part_of, waits_for_us

RUNNING, STOPPED = "running", "stopped"
STALLS = {"blocked": "hangs", "starved": "starved", "network": "waits", "disk": "waits", "sleep": "waits"}
"""The state of a process that took no step for far too long, by what its threads did."""
MAY_HANG = "may hang"
"""The same of one that computes, or wakes up now and then."""
NOT_SEEN = "not seen from here"
"""The state of an attempt without an end that was recorded on another machine: it may live there, or not."""


def is_alive(about: dict[str, Any]) -> bool:
    """Whether the process that attempt.json is about lives here."""
    return observe(about).alive


def state_of_living(
    about: dict[str, Any], events: list[dict[str, Any]], step: int | None, phase: str | None
) -> str:
    """`running`, unless a kernel idles, it is stopped, or a hang was noticed and no step came since.

    The judge's own words would say the same, and cost a live view all of its causes.
    """
    if is_kernel(about.get("command")) and (phase == IDLE or waits_for_us(count(about.get("pid")))):
        return "idle"
    if observe(about).stopped:
        return STOPPED
    hang = stall.standing(events)
    if hang is None or hang.get("is_quiet") is True or (hang.get("step") or 0) != (step or 0):
        return RUNNING
    return STALLS.get(stall.state_of(hang), MAY_HANG)


def state_of_unjudged(attempt: Attempt) -> tuple[str, int | None]:
    """What `buoy why` says of an attempt that nobody was left to judge, and its step; where no end was recorded, and
    nothing shows from here that it is gone, it may live on another machine.
    """
    from buoy.verdict.evidence import load
    from buoy.verdict.judge import judge  # every cause with it: a live view needs none

    evidence = load(attempt.folder)
    verdict = judge(evidence)
    cause, step = verdict.cause, verdict.where.step
    has_end = evidence.death or evidence.exit or evidence.is_death_damaged or evidence.events_of("end")
    if evidence.now.same_machine is not False or has_end:
        return cause.id, step
    is_known = cause.claim.grade == "certain" or evidence.now.sees_inside
    return (NOT_SEEN if cause.id in ("unknown", "machine-lost") and not is_known else cause.id), step


def recorder_lives(about: dict[str, Any], events: list[dict[str, Any]]) -> bool | None:
    """Whether the sidecar that began last is still there; None where its process cannot be seen from here."""
    from buoy.machine import procfs

    pid = next((event.get("sidecar") for event in reversed(events) if event.get("kind") == "start"), None)
    now = observe(about)
    if not isinstance(pid, int) or now.sees_inside or now.same_machine is not True:
        return None
    stat = procfs.stat_of(pid)
    is_there = stat is not None and stat.state not in ("Z", "X")
    return is_there and b"sidecar.py" in procfs.read_bytes(f"/proc/{pid}/cmdline")


_MOST_MINUTES = 50_000
"""A month's. Only damage makes more."""
_MOST_BYTES = 64 << 20
"""Of those minutes."""

LEAST_SECONDS = 2.0
"""Of steps without a pause: what is shorter tells no time per step."""

Step = tuple[float, float, bool]
"""Seconds since the attempt began, the step, and whether nothing ran then."""
Point = tuple[float, float, float]
"""Seconds since the attempt began, lowest and highest value seen there."""


@dataclass(slots=True)
class Life:
    """One attempt: what it was, what was measured, how it ended."""

    number: int
    about: dict[str, Any]
    seconds: float = 0.0
    series: dict[str, list[Point]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The newest sample, by field name; empty when there is none."""
    alive: bool = False
    """Whether its process lives on this machine."""
    peaks: dict[str, float] = field(default_factory=dict)
    """The highest value of each series."""

    @property
    def ended(self) -> bool:
        """Whether the sidecar wrote its end, or a verdict was given."""
        return self.verdict is not None or any(event.get("kind") == "end" for event in self.events)

    @property
    def cause(self) -> str | None:
        """The id of what ended it; None without a verdict."""
        return (
            str(mapping(self.verdict.get("cause")).get("id", "ended")) if self.verdict is not None else None
        )

    @property
    def limits(self) -> dict[str, Any]:
        """Of the machine, as they were read at the start."""
        return mapping(self.about.get("limits"))

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Of the machine, as they were read at the start."""
        return mappings(self.limits.get("gpus"))

    @property
    def is_untimed(self) -> bool:
        """Whether steps were made, and too few at a stretch to tell their time."""
        return bool(self.last.get("step")) and "step_seconds" not in self.series

    @property
    def steps_done(self) -> int | None:
        """The steps of this attempt: its last one counts from the run's first, and what trained may have gone on."""
        last = self.last.get("step")
        told = [event for event in self.events if event.get("kind") in ("training", "loop")]
        began = told[-1].get("step") if told and told[-1].get("kind") == "training" else 0
        if not isinstance(last, int) or not isinstance(began, int) or last <= began:
            return None
        return last - began

    def since_start(self, event: dict[str, Any]) -> float | None:
        """When an event happened, in seconds since the attempt began; the wall clock may have moved, `t` does not."""
        moment, start = number(event.get("t")), number(self.about.get("t"))
        return moment - start if moment is not None and start is not None else None


@dataclass(slots=True)
class History:
    """A run from its first attempt to its last."""

    folder: str
    name: str
    lives: list[Life]
    missing: list[str] = field(default_factory=list)
    """What of the run itself cannot be read."""

    @property
    def kept(self) -> str:
        """Where the checkpoints are."""
        return self.homes[0]

    @property
    def homes(self) -> list[str]:
        """The folders of all runs whose checkpoints this page is to show, the one that saved last first."""
        if not attempt_numbers(self.folder):
            return [self.folder]  # recorded by a notebook, kept here
        return _homes([event for life in self.lives for event in life.events], self.folder)


def _homes(events: list[dict[str, Any]], recorded: str) -> list[str]:
    """In a notebook the recorder may run in another folder than `buoy.Run`: the saves say where those are."""
    found: dict[str, None] = {}
    for event in reversed(events):
        path = event.get("path")
        if event.get("kind") == "save" and event.get("what") == "buoy" and isinstance(path, str):
            folder = os.path.dirname(os.path.dirname(path))
            if folder not in found and not os.path.isdir(folder):
                folder = _moved(events, recorded, os.path.basename(folder))
            found[folder] = None
    return list(found) or [recorded]


def _moved(events: list[dict[str, Any]], recorded: str, name: str) -> str:
    """A run beside the recording, which was copied here together with it."""
    for event in events:
        if event.get("kind") == "opened" and isinstance(event.get("run"), str):
            folder = os.path.normpath(os.path.join(recorded, event["run"]))
            if os.path.basename(folder) == name and os.path.isdir(folder):
                return folder
    return recorded


def read(run_folder: str) -> History:
    """Everything the run folder says; what is missing or torn is noted, never raised."""
    marker = read_json(os.path.join(run_folder, "run.json")) or {}
    name = str(marker.get("name") or os.path.basename(os.path.abspath(run_folder)))
    lives = []
    for attempt in attempts_of(run_folder):
        life = read_life(attempt)
        if life.verdict is not None:
            took_part = any(event.get("kind") == "opened" for event in life.events)
            life.verdict = _judged(attempt, run_folder) if took_part else {**life.verdict, "run": run_folder}
        life.events = own_events(life, attempt, run_folder)
        lives.append(life)
    return History(run_folder, name, lives, missing_of(run_folder))


def _judged(attempt: Attempt, run_folder: str) -> dict[str, Any]:
    from buoy.verdict import verdict_on
    from buoy.verdict.select import part_in

    return verdict_on(part_in(attempt, run_folder)).to_json()


def of_its_own(life: Life, attempt: Attempt, run_folder: str) -> str | None:
    """How a run ended within a process that went on, as one word; None where its end is the process's."""
    step, phase = count(life.last.get("step")), text(life.last.get("phase"))
    return part_of(run_folder, attempt.run_folder, life.events, life.about, step, phase, life.ended)[1]


def own_events(life: Life, attempt: Attempt, run_folder: str) -> list[dict[str, Any]]:
    """The events without the checkpoints of other runs; all of them, each with its run's name (`of`), where the folder
    only holds a recording."""
    own = training_of(life.events, attempt.run_folder, run_folder)
    if not own.opened and not own.began:
        return [
            {**event, "of": saved_in(event)} if event.get("what") == "buoy" else event
            for event in life.events
        ]
    name = os.path.basename(os.path.abspath(run_folder))
    return [event for event in life.events if event.get("what") != "buoy" or saved_in(event) == name]


def saved_in(save: dict[str, Any]) -> str:
    """The name of the run that a checkpoint was saved in."""
    return os.path.basename(os.path.dirname(os.path.dirname(str(save.get("path") or ""))))


def read_life(attempt: Attempt, every: int = 1) -> Life:
    """One attempt of the run; `every`: of the samples at full rate read each n-th, and the last of a file."""
    folder, number = attempt.folder, attempt.number
    about = read_json(os.path.join(folder, "attempt.json"))
    life = Life(number, about or {})
    if about is None:
        life.missing.append("attempt.json: what was known at the start")
    life.events = read_events(folder)
    life.verdict = read_json(os.path.join(folder, "verdict.json"))
    life.alive = not life.ended and is_alive(life.about)
    if sum(_size(path) for path in sample_files(folder)) > SAMPLES_MOST_BYTES:
        life.missing.append("samples: there are far more than buoy keeps; only the newest were read")
    _measure(life, _minutes(os.path.join(folder, "minutes.jsonl")), read_samples(folder, every=every))
    ran_for = (life.verdict or {}).get("ran_for")
    if is_number(ran_for) and life.series:  # the last sample is a moment older than the end
        life.seconds = max(life.seconds, float(ran_for))  # type: ignore[arg-type]
    beacon = read_beacon(os.path.join(folder, f"process-{life.about.get('pid')}", "beacon"))
    if beacon is not None and beacon.step_t:  # a sample is a moment older
        life.last = {**life.last, "step": beacon.step, "phase": beacon.phase}
    if not life.series and not life.last:
        life.missing.append("samples: nothing was measured in this attempt")
    elif life.is_untimed:
        least, of = (
            f"{LEAST_SECONDS:.0f} s",
            f"its {done} steps" if (done := life.steps_done) else "its steps",
        )
        life.missing.append(f"time per step: of {of} no {least} without a pause were recorded")
    if not life.ended and not life.alive:
        life.missing.append("its end: the log stops without one")
    return life


def _minutes(path: str) -> Iterator[dict[str, Any]]:
    """One dict per minute: field -> [min, max, last]."""
    fields: list[str] = []
    for line in islice(read_lines(path, _MOST_BYTES), _MOST_MINUTES):
        if isinstance(line, dict):
            fields = fields_of(line)
        elif fields and len(line) == len(fields):
            row = {name: value for name, value in zip(fields, line, strict=True) if isinstance(value, list)}
            if is_triple(row.get("t")):
                yield row


def _measure(life: Life, minutes: Iterator[dict[str, Any]], samples: Iterator[dict[str, Any]]) -> None:
    """Row by row: a long run's are many."""
    timed = (row for row in samples if is_number(row.get("t")))
    first, earliest = next(timed, None), next(minutes, None)
    start = number(life.about.get("t"))
    if start is None:
        begins = [row["t"] for row in [first] if row] + [row["t"][0] for row in [earliest] if row]
        start = life.about["t"] = float(min(begins, default=0.0))
    series: dict[str, list[Point]] = {name: [] for name in _READINGS}
    steps: list[Step] = []
    highest: dict[str, float] = {}
    for row in chain([earliest] if earliest else (), minutes):
        # Of the samples at full rate not all may have been read: the minutes know the highest.
        for name, fields in _READINGS.items():
            if is_triple(row.get(fields[0])):
                highest[name] = max(highest.get(name, 0.0), float(row[fields[0]][1]))
        if first is None or row["t"][1] < first["t"]:
            _add_minute(row, start, series, steps)
        if first is None:
            life.last = {name: measured(name, value[2]) for name, value in row.items() if len(value) == 3}
    for row in chain([first] if first else (), timed):
        _add_sample(row, start, series, steps)
        life.last = row if "wall" in row else life.last
    series["step_seconds"] = _step_times(steps)
    life.series = {name: points for name, points in series.items() if points}
    life.peaks = {
        name: max(highest.get(name, 0.0), *(point[2] for point in points))
        for name, points in life.series.items()
    }
    life.seconds = max((points[-1][0] for points in life.series.values()), default=0.0)


# What is drawn -> the fields it may come from, best first. `cgroup_used` is what the kernel compares with the limit.
_READINGS = {
    "memory": ("cgroup_used", "tree_rss", "rss"),
    "process": ("tree_rss", "rss"),
    "gpu": ("gpu_used",),
    "disk_free": ("disk_free",),
    "shm_free": ("shm_free",),
}


def _add_minute(row: dict[str, Any], start: float, series: dict[str, list[Point]], steps: list[Step]) -> None:
    middle = (row["t"][0] + row["t"][1]) / 2 - start
    for name, fields in _READINGS.items():
        value = next((row[key] for key in fields if is_triple(row.get(key))), None)
        if value is not None and middle >= 0:
            series[name].append((middle, float(value[0]), float(value[1])))
    if is_triple(row.get("step")):
        idle = IDLE in (row.get("phase") or ())  # a minute with a pause in it tells no step's time
        steps.append((row["t"][0] - start, float(row["step"][0]), idle))
        steps.append((row["t"][1] - start, float(row["step"][1]), idle))


def _add_sample(row: dict[str, Any], start: float, series: dict[str, list[Point]], steps: list[Step]) -> None:
    moment = float(row["t"]) - start
    if moment < 0:
        return
    # Else it only tells where the training was.
    for name, fields in _READINGS.items() if "wall" in row else ():
        value = next((row[key] for key in fields if is_number(row.get(key))), None)
        if value is not None:
            series[name].append((moment, float(value), float(value)))
    if is_number(row.get("step")):
        steps.append((moment, float(row["step"]), row.get("phase") == IDLE))


def _step_times(steps: list[Step]) -> list[Point]:
    """Seconds per step, over stretches of at least two seconds in which steps were done.

    What came before the first step of a training, or of a notebook's cell, is no part of its time; nor is the pause
    between two cells.
    """
    points: list[Point] = []
    since: tuple[float, float] | None = None
    stepped, before = False, 0.0
    for moment, step, idle in steps:
        if since is None or idle or step < before:
            since, stepped = (moment, step), False
        elif step > since[1] and not stepped:
            since, stepped = (moment, step), True
        elif step > before and moment - since[0] >= LEAST_SECONDS:  # not at a sample that only waits
            each = (moment - since[0]) / (step - since[1])
            # From where it began: at its end alone, the last one would be a single dot.
            points += [(since[0], each, each), (moment, each, each)]
            since = (moment, step)
        before = step
    return points


def is_number(value: Any) -> bool:
    """A finite number, not a truth value: logs may be damaged."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_triple(value: object) -> bool:
    """`[min, max, last]` of numbers."""
    return isinstance(value, list) and len(value) == 3 and all(map(is_number, value))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


_HOMES = re.compile(r"(?<![\w.])(?:/home/[^/\s`'\"]+|/Users/[^/\s`'\"]+|/root)(?=/|\b)")
_PATH = re.compile(r"(?<![\w.~:/\x00])/(?:[^/\s`'\",;:()]+/)+[^/\s`'\",;:()]*")
_QUOTED = re.compile(r"(?<=')/[^'`]+(?=')")
"""As a shell takes it where a name holds a space or the like."""
_KNOWN = re.compile(r"('\0\d+\0[^'`]*')")
"""A quoted path in a folder that is known."""
_COMMAND = re.compile(r"(`[^`]*`)")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def without_places(value: Any, about: dict[str, Any], run_folder: str | None = None) -> Any:
    """The same value, its texts without host name, home and absolute paths; `about` is attempt.json."""
    host, cwd = about.get("hostname"), about.get("cwd")
    here = os.path.abspath(run_folder) if run_folder is not None else None
    folders = [folder for folder in (cwd, here) if isinstance(folder, str) and folder != "/"]

    names = [(folder, _seen_from(folder, cwd)) for folder in sorted(folders, key=len, reverse=True)]

    def told(text: str) -> str:
        # Known folders are kept apart until the others are shortened: their names may hold any sign.
        for index, (folder, _) in enumerate(names):
            text = text.replace(folder.rstrip("/") + "/", f"\0{index}\0")
        text = "".join(map(_without_paths, _COMMAND.split(text)))
        for index, (_, name) in enumerate(names):
            text = text.replace(f"\0{index}\0", name)
        if isinstance(host, str) and len(host) > 2:
            name = re.escape(host)
            text = re.sub(rf"\bhost {name}\b", "one host", text)
            text = re.sub(rf"\b{name}\b", "the host", text)
        return text

    return _mapped(value, told)


def _seen_from(folder: str, cwd: object) -> str:
    """A folder as it was typed where the training ran, so that a command with it still runs there; else its name."""
    if folder == cwd:
        return ""
    is_below = isinstance(cwd, str) and cwd != "/" and folder.startswith(cwd.rstrip("/") + "/")
    return (os.path.relpath(folder, str(cwd)) if is_below else os.path.basename(folder)) + "/"


def _without_paths(text: str) -> str:
    """A command that a shortened path makes impossible to run is no longer shown as one."""
    pieces = [
        piece if number % 2 else _PATH.sub(_shortened, _HOMES.sub("~", _QUOTED.sub(_shortened, piece)))
        for number, piece in enumerate(_KNOWN.split(text))
    ]
    shorter = "".join(pieces)
    return shorter.strip("`") if ".../" in shorter and text.startswith("`") else shorter


def _shortened(found: re.Match[str]) -> str:
    """Of a path its last two names: enough to know a file by, nothing of where it was."""
    path = found[0]
    return path if path.startswith(_SYSTEM) else ".../" + "/".join(path.rstrip("/").split("/")[-2:])


def _mapped(value: Any, told: Any) -> Any:
    if isinstance(value, str):
        return told(value)
    if isinstance(value, dict):
        return {key: _mapped(item, told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, told) for item in value]
    return value


_SWITCHES = {
    "amp": "mixed precision",
    "checkpointing": "activation checkpointing",
    "expandable_segments": "expandable segments",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One adaptation: when, at which step, and what."""

    attempt: int
    at: float | None
    """Seconds since the attempt began."""
    step: int | None
    text: str


def words(event: dict[str, Any]) -> str | None:
    """What an event says was adapted; None when it tells of nothing of the kind.

    >>> words({"kind": "retry", "what": "oom", "samples": 64, "smaller": 32})
    'out of memory with 64 samples at once: done again, 32 at a time'
    """
    kind, what = event.get("kind"), printable(str(event.get("what", "")), 60)
    samples = event.get("samples")
    if kind == "retry" and what == "oom":
        smaller = event.get("smaller")
        again = "retried unchanged" if smaller == samples else f"retried in micro-batches of {smaller}"
        return f"out of memory with {samples} samples: {again}"
    if kind == "retry":
        return f"out of memory in the {what}: rolled back and retried"
    if kind == "sized" and samples != event.get("of"):
        return f"batches of {event.get('of')} are computed {samples} samples at a time"
    if kind == "remedy":
        name = str(event.get("name"))
        blocks = event.get("blocks")
        where = f" in {blocks} blocks" if isinstance(blocks, int) and blocks > 0 else ""
        return f"{_SWITCHES.get(name, printable(name, 60))} switched on{where}"
    if kind == "retention":
        return printable(str(event.get("text", "")), 200)
    return None


def changes(history: History) -> list[Change]:
    """Every adaptation of the run, in order."""
    found = []
    for life in history.lives:
        for event in life.events:
            text = words(event)
            if text is not None:
                step = event.get("step")
                found.append(
                    Change(
                        life.number,
                        life.since_start(event),
                        step if isinstance(step, int) else None,
                        without_places(text, life.about),
                    )
                )
    return found


def sizes(folder: str) -> list[dict[str, Any]]:
    """Samples at once from which step on; None is the whole batch. `parts` hold for their step only."""
    found: list[dict[str, Any]] = []
    for line in read_lines(os.path.join(folder, "micro-batches.jsonl")):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        if isinstance(line.get("parts"), list):
            found.append({"step": line["step"], "parts": line["parts"]})
            continue
        samples = line.get("samples", line.get("size")) or None
        if not found or "parts" in found[-1] or found[-1]["samples"] != samples:
            found.append({"step": line["step"], "samples": samples})
    return found
