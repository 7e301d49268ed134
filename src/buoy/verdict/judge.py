"""From evidence to verdict: the first cause that fits, how it ended, where it was, who held the memory."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from buoy.fields import count, integer, mapping, mappings, number, text
from buoy.text import printable, whole_number
from buoy.units import format_bytes, format_duration
from buoy.verdict.advice import how_to_resume
from buoy.verdict.causes import IN_ORDER, exits
from buoy.verdict.causes.common import (
    died_before,
    recent_signal,
    standing_hang,
    status_reading,
    violent_deaths,
)
from buoy.verdict.causes.lost import parent_name
from buoy.verdict.causes.stalls import past as past_hang
from buoy.verdict.causes.stalls import standing as standing_thrashing
from buoy.verdict.evidence import Evidence, ProcessNotes
from buoy.verdict.exceptions import classify, lost_child
from buoy.verdict.memory import standing, variables, with_memory
from buoy.verdict.model import Cause, Claim, Holder, Reading, Verdict, Where
from buoy.verdict.oom import describe_limit
from buoy.verdict.stacks import cell_of, headline, user_frame

_MEMORY_CAUSES = ("kernel-oom", "worker-killed", "memory-error", "gpu-oom", "thrashing", "shm-full", "killed",
                  "recorder-lost", "unknown")  # fmt: skip
_SHARED = "RSS: with shared and file pages that the limit does not count"
_PARENT_SECONDS = 10.0
"""A parent that ended longer before has nothing to do with it: whoever logs out leaves trainings behind."""
_JUST_BEFORE = 5.0
"""Seconds before the end in which a child held its memory beside the others."""
_ALIVE = ("still-running", "hang", "starved", "waiting", "thrashing")
_CHILDREN_MOST = 2
_PID = re.compile(r"pid (\d+)")


def judge(evidence: Evidence) -> Verdict:
    """What the evidence says about this attempt."""
    cause = next((found for judge_one in IN_ORDER if (found := judge_one(evidence)) is not None), None)
    cause = with_memory(_with_history(evidence, cause or exits.judge_unknown(evidence)), evidence)
    if _trained_nothing(evidence):
        cause = replace(cause, next=tuple(step for step in cause.next if step != how_to_resume(evidence)))
    return Verdict(
        run=evidence.run_folder,
        attempt=count(evidence.attempt.get("number")) or _number_of(evidence.folder),
        mechanism=_mechanism(evidence),
        cause=cause,
        where=_where(evidence, cause),
        holders=_holders(evidence, cause.id)
        if cause.id in _MEMORY_CAUSES or standing(evidence) is not None
        else (),
        wall=evidence.died_wall,
        ran_for=_ran_for(evidence, cause),
    )


def _trained_nothing(evidence: Evidence) -> bool:
    """Whether no step was counted and no training announced in this notebook's kernel: there is nothing to resume."""
    stepped = evidence.main is None or bool(evidence.main.step) or bool(evidence.last_sample.get("step"))
    return (
        evidence.is_kernel
        and not stepped
        and not any(event.get("kind") in ("training", "loop") for event in evidence.events)
    )


def _number_of(folder: str) -> int:
    return whole_number(os.path.basename(folder)) or 0


def _ran_for(evidence: Evidence, cause: Cause) -> float | None:
    began = number(evidence.attempt.get("wall"))
    if cause.id in _ALIVE and began is not None:
        return max(0.0, evidence.now.wall - began)
    return evidence.ran_for


def _mechanism(evidence: Evidence) -> Claim:
    status = evidence.status
    if status.known:
        return Claim(str(status), "certain", (status_reading(evidence),))
    if not evidence.is_dead:
        return Claim("none: the process is alive", "certain")
    speaker = evidence.speaker
    if speaker and (words := headline(speaker.fault.text)):
        source = Reading(words, f"process-{speaker.pid}/fault.txt", speaker.fault.wall)
        return Claim(f"probably the signal of `{printable(words, 60)}`", "likely", (source,))
    if speaker and speaker.exception:
        return Claim(
            "exit code 1, as after every uncaught exception",
            "likely",
            (Reading("an exception note", speaker.source),),
        )
    if speaker and speaker.left_in_order:
        return Claim("an orderly exit, code not read", "likely", (Reading("an exit note", speaker.source),))
    return Claim("unknown: the exit status could not be read", "possible")


def _with_history(evidence: Evidence, cause: Cause) -> Cause:
    """The cause, with what had gone wrong before the end in its cascade."""
    before = [*_lost_samples(evidence, cause), *_lost_children(evidence, cause)]
    if evidence.crashed_at_exit and evidence.is_dead:
        words = f"it then crashed, while the interpreter was shutting down: {evidence.status}"
        before.append(Claim(words, "certain", (status_reading(evidence),)))
    hang = standing_hang(evidence)
    if hang is not None and cause.id not in (*_ALIVE, "clean-exit"):
        stalled = past_hang(evidence, hang)
        before += [stalled] if stalled is not None else []
    if cause.id in ("killed", "hang", "terminated", "unknown", "recorder-lost"):
        slow = standing_thrashing(evidence)
        if slow is not None:
            before.append(replace(slow, grade="possible"))
    parent, age = evidence.parent_death, evidence.parent_age
    was_first = parent is not None and not parent.is_together and age is not None and age < _PARENT_SECONDS
    if parent and was_first and cause.id not in (*_ALIVE, "clean-exit", "parent-lost"):
        reading = Reading(f"{parent_name(parent)}: {parent.death.status}", "events.jsonl", parent.death.wall)
        words = f"what had started it, {parent_name(parent)}, had ended {format_duration(age)} before"
        before.append(Claim(words, "certain", (reading,)))
    if cause.id in ("kernel-oom", "native-crash", "python-exception", "bus-error"):
        term = recent_signal(evidence, "SIGTERM")
        if term is not None:
            before.append(
                Claim(
                    f"it had received SIGTERM {format_duration(term.age)} before",
                    "certain",
                    (term.reading,),
                )
            )
    exception = evidence.exception
    if exception and evidence.status.signal is not None and cause.id != "interrupted":
        words = f"an exception had been reported earlier: {printable(classify(exception).short, 80)}"
        before.append(Claim(words, "possible"))
    after = _troubles(evidence) if cause.id != "clean-exit" else []
    return replace(cause, cascade=(*before, *cause.cascade, *after)) if before or after else cause


def _troubles(evidence: Evidence) -> list[Claim]:
    """The last part of buoy itself that failed in this attempt."""
    for event in reversed(evidence.events_of("trouble")):
        if text(event.get("error")) and text(event.get("what")):
            age = evidence.seconds_before_death(number(event.get("wall")))
            when = f", {format_duration(age)} before" if age is not None else ""
            words = f"a part of buoy itself failed{when}: {printable(event['what'], 160)}"
            return [Claim(words, "certain", (Reading("an event of the recorder", "events.jsonl"),))]
    return []


def _lost_samples(evidence: Evidence, cause: Cause) -> list[Claim]:
    """That what is said of its last moments rests on less than was recorded."""
    if evidence.lost_samples is None or cause.id == "clean-exit":
        return []
    return [Claim(evidence.lost_samples, "certain", (Reading("the time of the last sample", "death.json"),))]


def _lost_children(evidence: Evidence, cause: Cause) -> list[Claim]:
    """The violent deaths of child processes, whatever the cause makes of them; the last two one by one."""
    if cause.id in _ALIVE:
        return []
    told = {pid for claim in (cause.claim, *cause.cascade) for pid in _PID.findall(claim.text)}
    found = [child for child in violent_deaths(evidence) if str(child.death.pid) not in told]
    shown = found[-_CHILDREN_MOST:]
    more = len(found) - len(shown)
    return [child.claim(0 if index else more) for index, child in enumerate(shown)]


def _where(evidence: Evidence, cause: Cause) -> Where:
    where, main = _told_where(evidence, cause), evidence.main
    if where.file and evidence.speaker is not None:
        where = replace(where, file_cell=cell_of(where.file, evidence.speaker.cells))
    # A command that it ran counts no steps of its own.
    if where.step is None and main is not None and main.step:
        return replace(where, step=main.step, epoch=main.epoch)
    return where


def _told_where(evidence: Evidence, cause: Cause) -> Where:
    speaker = evidence.speaker
    if speaker is None:
        return _last_seen(evidence)
    if speaker.is_messenger:  # a launcher: its own line says nothing, the lost child's step does
        lost = lost_child(speaker.exception or {})
        child = evidence.processes.get(lost.pids[0]) if lost is not None and lost.pids else None
        if child is not None:
            return Where(child.step, child.epoch, child.phase, child.cell)
        if not speaker.step:
            return _last_seen(evidence)
        # What counts steps is the training itself, and ran a command in that line.
    where = Where(speaker.step, speaker.epoch, speaker.phase, speaker.cell)
    place = mapping((speaker.exception or {}).get("where"))
    if text(place.get("file")) and evidence.status.signal in (None, 2):
        return replace(
            where, file=place["file"], line=integer(place.get("line")), function=text(place.get("function"))
        )
    return _from_stacks(evidence, speaker, where, cause)


def _last_seen(evidence: Evidence) -> Where:
    last = evidence.last_sample
    return Where(step=count(last.get("step")) or None, phase=text(last.get("phase")))


def _from_stacks(evidence: Evidence, speaker: ProcessNotes, where: Where, cause: Cause) -> Where:
    """The innermost user frame of the newest stack text, and how old that is unless the death itself wrote it."""
    if cause.id in ("clean-exit", "exit-code"):
        return where
    signal = evidence.status.signal
    if speaker.pid != evidence.pid and signal is None:  # what ran it passed its end on
        signal = (evidence.status.exit_code or 0) - 128
    fatal = signal in (4, 5, 6, 7, 8, 11) or not evidence.status.known
    dumps = [(speaker.fault, True)] if fatal else []
    dumps += [(dump, False) for _, dump in speaker.signals if dump.text]
    dumps.append((speaker.stacks, False))
    dumps = [(dump, own) for dump, own in dumps if dump.text]
    dumps.sort(key=lambda item: (item[1], item[0].wall or 0.0), reverse=True)
    for dump, own in dumps:
        frame = user_frame(dump.text)
        if frame is None:
            continue
        age = None if own else evidence.seconds_before_death(dump.wall)
        if not evidence.is_dead and dump.wall is not None:
            age = max(0.0, evidence.now.wall - dump.wall)
        old = None if age is not None and age < 0.5 else age
        return replace(where, file=frame.file, line=frame.line, function=frame.function, seconds_before=old)
    return where


def _holders(evidence: Evidence, cause: str) -> tuple[Holder, ...]:
    found = variables(evidence, on_device=cause == "gpu-oom")
    exception = evidence.exception
    asked = classify(exception).asked if exception and evidence.status.signal is None else None
    if asked is not None:
        found.append(
            Holder("the allocation that failed", asked, None, f"asked for {format_bytes(asked)} at once")
        )
    processes = _held_by(evidence)[:4]
    limit, _ = describe_limit(evidence)
    beyond = bool(limit and sum(count(process.get("rss")) or 0 for process in processes) > limit)
    for process in processes:
        name = printable(text(process.get("name")) or "process", 60)
        detail = text(process.get("role"))
        if beyond:
            detail, beyond = f"{detail}; {_SHARED}" if detail else _SHARED, False
        found.append(Holder(name, count(process.get("rss")), count(process.get("pid")), detail))
    for process in mappings(mapping(evidence.death.get("cgroup")).get("foreign"))[:2]:
        if count(process.get("rss")) is None:
            continue
        name = printable(text(process.get("name")) or "process", 60)
        role = text(process.get("role")) or "not part of this run"
        found.append(Holder(name, count(process.get("rss")), count(process.get("pid")), role))
    if not found and (rss := count(evidence.last_sample.get("tree_rss"))) is not None:
        found.append(Holder("all its processes, last seen", rss))
    return tuple(found)


def _held_by(evidence: Evidence) -> list[dict[str, Any]]:
    """Who held memory at the end, the largest first: with the children that were killed just before it."""
    listed = mappings(evidence.death.get("processes"))
    seen = {process.get("pid") for process in listed}
    killed = [
        {"pid": child.pid, "name": child.name, "rss": child.rss, "role": "until it was killed"}
        for child in evidence.child_deaths
        if child.rss and child.status.signal == 9 and died_before(evidence, child, _JUST_BEFORE) is not None
        and child.pid not in seen
    ]  # fmt: skip
    known = [process for process in (*listed, *killed) if count(process.get("rss")) is not None]
    return sorted(known, key=lambda process: -(count(process.get("rss")) or 0))
