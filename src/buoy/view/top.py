"""Where a run is right now, as numbers and as a few lines: what `buoy top` and a notebook's live card show."""

from __future__ import annotations

import os
import time
from typing import Any

from buoy.checkpoint.store import Store
from buoy.errors import in_notebook
from buoy.fields import count, number
from buoy.flight.alarms.forecast import Forecast
from buoy.flight.attempt import Attempt, attempts_of
from buoy.flight.beacon import read_beacon
from buoy.flight.trainings import training_of
from buoy.machine.files import read_json
from buoy.text import printable, typed, visible
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import NOT_BEGUN
from buoy.verdict.notebook import IDLE, STORIES
from buoy.verdict.select import Asked, concerned
from buoy.view.history import (
    MAY_HANG,
    NOT_SEEN,
    RUNNING,
    STALLS,
    STOPPED,
    Life,
    Point,
    is_alive,
    of_its_own,
    own_events,
    read_life,
    recorder_lives,
    saved_in,
    sizes,
    state_of_living,
    state_of_unjudged,
    words,
)

SCHEMA = "buoy.top/1"
_FOLLOWED_SECONDS = 180.0
"""A recording on another machine is followed as long as its last reading is younger; mirrors are written rarely."""
_STALE_SECONDS = 5.0
"""A reading this old is no longer shown as the present one: the recorder takes several in a second."""
LIVES = (RUNNING, STOPPED, MAY_HANG, *STALLS.values(), "idle", "no sample yet")
"""What may yet change."""
_NO_DEATH = (*LIVES, NOT_SEEN, "not known", "clean-exit", *STORIES.values())
_MOST_EVENTS = 20
_BAR = 24


def state_of(asked: Asked) -> dict[str, Any]:
    """The state of what is asked for: of a run, that of the last attempt that did a step of it, as `why` has it."""
    now = state(asked.attempt, None if asked.of_process else asked.run)
    idle = STORIES[NOT_BEGUN]
    if asked.of_process or now["status"] != idle or is_alive(_about(asked.attempt)):
        return now
    from buoy.verdict.select import MOST_LOOKS, opened_again  # every cause with it: a live view needs none

    others = [each for each in attempts_of(asked.run) if each != asked.attempt]
    for other in reversed(others[-MOST_LOOKS:]):
        before = state(other, asked.run)
        if before["status"] != idle:
            return {**before, "beside": opened_again(now["attempt"])}
    return now


def _about(attempt: Attempt) -> dict[str, Any]:
    return read_json(os.path.join(attempt.folder, "attempt.json")) or {}


def state(attempt: Attempt, run: str | None = None) -> dict[str, Any]:
    """The numbers of a run within the attempt that records it; what is not known is None.

    Without a run: of the one that the attempt's process is at, and the end of that process where it has ended.
    """
    of_process, run = run is None, run or concerned(attempt)
    life = read_life(attempt, every=8)  # about one a second is enough here
    unrecorded = _unrecorded(life)
    if unrecorded is not None:
        _look_without_recorder(life, attempt)
    last, about = life.last, life.about
    story = of_its_own(life, attempt, run) if life.alive or not of_process else None
    own = training_of(life.events, attempt.run_folder, run)
    wall = number(last.get("wall"))
    age = max(0.0, time.time() - wall) if wall is not None else None
    return {
        "schema": SCHEMA,
        "run": run,
        "name": os.path.basename(run),
        "attempt": attempt.number,
        "status": STORIES[story] if story is not None else _status(life, attempt),
        "sample_age": age,
        "unrecorded": unrecorded,
        "seconds": life.seconds if last else None,
        "step": (own.step or 0) if story is not None or own.is_beside else number(last.get("step")),
        "last_step": own.length if story is None and not own.is_beside else None,
        "phase": last.get("phase") if story is None else None,
        "step_seconds": _step_seconds(life) if story is None else None,
        "resources": _resources(life, forecast=unrecorded is None),
        "time": _time(life, about),
        "micro_batch": _micro_batch(run),
        "checkpoint": _checkpoint(run),
        "events": _events(life, own_events(life, attempt, run), os.path.basename(run)),
        "loop_beside": number(last.get("step")) if life.alive and own.is_followed_by_a_loop else None,
    }


def _unrecorded(life: Life) -> dict[str, Any] | None:
    """Since when nothing is recorded of a process that lives, and whether its recorder is gone; None if it is well."""
    since = number(life.last.get("wall")) or number(life.about.get("wall"))
    if not life.alive or since is None or time.time() - since < _STALE_SECONDS:
        return None
    lives = recorder_lives(life.about, life.events)
    return {"seconds": time.time() - since, "recorder": {True: "silent", False: "gone", None: None}[lives]}


def _look_without_recorder(life: Life, attempt: Attempt) -> None:
    """What can be known all the same: the clock, and the page on which the training itself says where it is."""
    life.seconds = max(life.seconds, time.time() - (number(life.about.get("wall")) or time.time()))
    life.series.pop("step_seconds", None)
    beacon = read_beacon(os.path.join(attempt.folder, f"process-{life.about.get('pid')}", "beacon"))
    if beacon is not None:
        life.last = {**life.last, "step": beacon.step, "phase": beacon.phase}


def may_change(now: dict[str, Any]) -> bool:
    """Whether it is worth looking again."""
    age = now["sample_age"]
    is_followed = now["status"] == NOT_SEEN and age is not None and age < _FOLLOWED_SECONDS
    return now["status"] in LIVES or is_followed


def _status(life: Life, attempt: Attempt) -> str:
    if life.cause is not None:
        return life.cause
    if not life.alive:
        return state_of_unjudged(attempt)[0]
    if not life.last.get("wall"):
        return "no sample yet"
    return state_of_living(life.about, life.events, count(life.last.get("step")), life.last.get("phase"))


def _step_seconds(life: Life) -> float | None:
    """Of the last steps that were timed; None if another training has begun since."""
    begun = [life.since_start(event) for event in life.events if event.get("kind") in ("training", "loop")]
    measured = life.series.get("step_seconds")
    if not measured or (begun and begun[-1] is not None and begun[-1] > measured[-1][0]):
        return None
    return measured[-1][1]


def _resources(life: Life, forecast: bool) -> list[dict[str, Any]]:
    limits, first = life.limits, life.gpus[0] if life.gpus else {}
    found = [
        _used(life, "RAM", "memory", number(life.last.get("cgroup_limit")) or number(limits.get("ram"))),
        _used(life, "VRAM", "gpu", number(first.get("total"))),
        _disk(life, number(limits.get("disk"))),
        _free("shm", life.series.get("shm_free"), number(limits.get("shm")), life),
    ]
    return [{**item, **({} if forecast else {"full_in": None})} for item in found if item is not None]


def _used(life: Life, name: str, series: str, limit: float | None) -> dict[str, Any] | None:
    points = life.series.get(series)
    if not points:
        return None
    # What is left after the end is what somebody else held: of a dead one the peak tells.
    return {
        "name": name,
        "used": life.peaks[series] if life.ended else points[-1][2],
        "is_peak": life.ended,
        "limit": limit,
        "full_in": _full_in(life, name, [(t, high) for t, _, high in points], limit),
    }


def _disk(life: Life, size_at_start: float | None) -> dict[str, Any] | None:
    """The disk that the run is kept on: the recording's own, or the one that a run was opened on later."""
    moved = next((event for event in reversed(life.events) if event.get("kind") == "disk"), None)
    since = life.since_start(moved) or 0.0 if moved is not None else 0.0
    # The first reading after a run was opened may still be of the disk before.
    points = [point for point in life.series.get("disk_free", ()) if not moved or point[0] > since + 1.5]
    size = number(life.last.get("disk_total")) or (size_at_start if moved is None else None)
    found = _free("disk", points, size, life)
    return {**found, "of": str(moved.get("path"))} if found is not None and moved is not None else found


def _free(name: str, points: list[Point] | None, size: float | None, life: Life) -> dict[str, Any] | None:
    if not points or not size or points[-1][1] > size:
        return None
    used = [(t, max(0.0, size - low)) for t, low, _ in points]
    return {
        "name": name,
        "used": used[-1][1],
        "limit": size,
        "full_in": _full_in(life, name, used, size),
    }


def _full_in(life: Life, name: str, points: list[tuple[float, float]], limit: float | None) -> float | None:
    """Seconds until it is full, where the recorder's own forecast would raise an alarm; else None."""
    if not limit or life.ended:
        return None
    forecast = Forecast(name, limit)
    fed = -1.0
    for moment, used in points[-6000:]:
        if moment - fed >= 1.0:  # one a second says as much as ten, and `top` answers at once
            forecast.feed(moment, int(moment) + 1, used)
            fed = moment
    outlook = forecast.exhaustion()
    return outlook.seconds if outlook is not None and outlook.alarm else None


def _time(life: Life, about: dict[str, Any]) -> dict[str, Any] | None:
    limit, started = number(about.get("time_limit")), number(about.get("session_started"))
    for event in life.events:  # in a notebook the recorder runs before `buoy.Run` is told of a limit
        if event.get("kind") == "time-limit":
            limit = number(event.get("seconds"))
    if limit is None or started is None:
        return None
    spent = max(0.0, (number(about.get("wall")) or started) - started) + life.seconds
    return {"spent": spent, "limit": limit, "left": max(0.0, limit - spent)}


def _micro_batch(folder: str) -> int | None:
    """The size in use; None while batches are done whole."""
    used = [line["samples"] for line in sizes(folder) if "samples" in line]
    return used[-1] if used and isinstance(used[-1], int) else None


def _checkpoint(folder: str) -> dict[str, Any] | None:
    entry = next((entry for entry in Store(folder).list() if entry.complete), None)
    if entry is None:
        return None
    age = max(0.0, time.time() - entry.time) if entry.time is not None else None
    return {"step": entry.step, "bytes": entry.bytes, "age": age}


def _events(life: Life, events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Warnings, adaptations, and the newest checkpoint: the ones before it say nothing that it does not."""
    told: list[dict[str, Any]] = []
    saved = None
    for event in events:
        text = event.get("text") if event.get("kind") == "warning" else words(event)
        if event.get("kind") == "save" and event.get("step") is not None:
            of = saved_in(event)
            text = f"checkpoint{'' if of in ('', name) else f' of {of}'} at step {event['step']}"
            told = [each for each in told if each is not saved]
        if text:
            told.append({"at": life.since_start(event), "text": printable(str(text), 240)})
            saved = told[-1] if event.get("kind") == "save" else saved
    return told[-_MOST_EVENTS:]


def lines(now: dict[str, Any], bar: int = _BAR, events: int = 4) -> list[str]:
    """The numbers for users: readable without colour; `bar` is its width (0: none), `events` how many are shown."""
    head = f"{printable(now['name'], 40)} #{now['attempt']}: {now['status']}"
    if now["seconds"] is not None:
        head += f" · {format_duration(now['seconds'])}"
    text = [head, *filter(None, [now.get("beside")]), *_silence(now), _pace(now)]
    if now["loop_beside"] is not None:
        text.append(f"a loop without a run trains in its process: step {now['loop_beside']:.0f} of its own")
    text.append("")
    for item in now["resources"]:
        peak = "at its peak" if item.get("is_peak") else ""
        note = "  ".join(filter(None, (peak, _warned(item["full_in"]), _which(item.get("of")))))
        text.append(_row(item["name"], item["used"], item["limit"], format_bytes, note, bar))
    if now["time"] is not None:
        left = f"{format_duration(now['time']['left'])} left"
        text.append(_row("time", now["time"]["spent"], now["time"]["limit"], format_duration, left, bar))
    text += ["", _safe(now)] if text[-1] else [_safe(now)]
    text += [
        f"  {format_duration(event['at']) if event['at'] is not None else '':>12}  {event['text']}"
        for event in now["events"][max(0, len(now["events"]) - events) :]
    ]
    if now["status"] not in _NO_DEATH:
        ask = "%buoy why" if in_notebook() else f"buoy why {_as_typed(now['run'])}"
        text.append(f"`{ask}` shows what happened")
    return list(map(visible, text))


def _as_typed(run: str) -> str:
    path = os.path.relpath(run)
    return typed(run if path.startswith(os.pardir) else path)


def _silence(now: dict[str, Any]) -> list[str]:
    if now["status"] == NOT_SEEN:
        age = now["sample_age"]
        last = (
            f"; its last reading is {format_duration(age)} old by that one's clock" if age is not None else ""
        )
        return [f"recorded on another machine: whether it is still alive cannot be seen from here{last}"]
    since = now["unrecorded"]
    if since is None:
        return []
    why = {"gone": ": the recorder is gone", "silent": ": the recorder is late"}.get(since["recorder"], "")
    old = "; what it measured is from then" if now["resources"] else ""
    return [f"nothing is recorded since {format_duration(since['seconds'])} ago{why}{old}"]


def _pace(now: dict[str, Any]) -> str:
    left = max(0.0, now["last_step"] - now["step"]) if now["last_step"] and now["step"] else None
    of = f" of {now['last_step']}" if left else ""
    parts = [f"step {now['step']:.0f}{of}" if now["step"] else "no step yet"]
    if now["phase"] and now["phase"] not in ("start", "train", IDLE):
        parts.append(str(now["phase"]))
    each = now["step_seconds"]
    if each and now["step"]:
        rate = f"{1 / each:.3g} steps/s" if each < 1 else f"{format_duration(each)} a step"
        parts.append(rate if now["status"] != "idle" else f"last at {rate}")
    if now["micro_batch"] is not None:
        parts.append(f"micro-batch {now['micro_batch']}")
    if each and now["status"] == "running":
        time_left = now["time"]["left"] if now["time"] is not None else None
        if left and (time_left is None or left * each <= time_left):
            parts.append(f"about {format_duration(left * each)} to go")
        elif time_left is not None:
            parts.append(f"about {_rough(time_left / each)} more before the time is up")
    return " · ".join(parts)


def _rough(count: float) -> str:
    """A number that is known to two digits or so.

    >>> _rough(274_886), _rough(42)
    ('270,000', '42')
    """
    size = 10 ** max(0, len(str(int(count))) - 2)
    return f"{round(count / size) * size:,}"


def _row(name: str, used: float, limit: float | None, tell: Any, note: str, wide: int) -> str:
    if not limit:
        return f"{name:>5}  {tell(used)} of n/a"
    share = used / limit
    filled = round(min(1.0, max(0.0, share)) * wide)
    bar = f"[{'#' * filled}{'.' * (wide - filled)}] " if wide else ""
    figures = f"{tell(used):>11} of {tell(limit):<9} {100 * share:>3.0f} %"
    return f"{name:>5}  {bar}{figures}{note and '  ' + note}"


def _warned(seconds: float | None) -> str:
    return f"full in {format_duration(seconds)} at this rate" if seconds is not None else ""


def _which(disk_of: str | None) -> str:
    return f"where {printable(os.path.basename(disk_of), 40)} is kept" if disk_of else ""


def _safe(now: dict[str, Any]) -> str:
    kept = now["checkpoint"]
    if kept is None:
        return "no checkpoint"
    age = f", {format_duration(kept['age'])} ago" if kept["age"] is not None else ""
    return f"safe at step {kept['step']} ({format_bytes(kept['bytes'])}{age})"
