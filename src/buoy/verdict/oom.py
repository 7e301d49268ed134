"""Did the kernel's OOM killer do it? Counters and the kernel log, with "unchanged" and "unreadable" kept apart.

The counters were read before the attempt and after the death. A process counted by its own memory group was killed
there; the machine's counter counts every kill anywhere. The kernel raises them before it sends the signal, so a
counter that was readable and has not moved is proof; one that could not be read proves nothing.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from buoy.fields import count, mapping, mappings, number, text
from buoy.machine.kernel_log import parse_oom_kill
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.evidence import Evidence, ProcessDeath
from buoy.verdict.model import Grade, Reading
from buoy.verdict.status import Status

SIGKILL = 9
_SAME_MOMENT = 5.0
"""Seconds before a death in which a counted kill may be this one: a large process takes time to vanish."""
_WATCHED = 10.0
"""Seconds of recording after which a group in which nobody else was seen may be taken to be ours alone."""
_LATELY = 60.0
"""A foreign process seen in the group within this time may have been the victim."""
_CONTRADICTED = 1.1


class OomFinding(NamedTuple):
    """The answer, how sure it is, and the readings; for `open`, `reason` says why it is unknown."""

    answer: Literal["oom", "not-oom", "open"]
    grade: Grade
    evidence: tuple[Reading, ...] = ()
    reason: str = ""


def examine(evidence: Evidence, death: ProcessDeath) -> OomFinding:
    """Whether this process was killed by the kernel for lack of memory."""
    if death.status.known and death.status.signal != SIGKILL:
        return OomFinding(
            "not-oom", "certain", (Reading(f"it ended with {death.status}", death.status.source or ""),)
        )
    log = _read_log(evidence, death)
    named = log.naming(death.pid)
    if named:
        return OomFinding("oom", "certain", named)
    group, host = _delta(evidence, death, "cgroup"), _delta(evidence, death, "host")
    if host is not None and host.total == 0:
        return OomFinding("not-oom", "certain", (host.reading,))
    # A victim that the log names is another only if this one's own pid is known.
    if host is not None and death.pid is not None and log.victims and host.total <= len(log.victims):
        lines = (Reading(log.others, "kernel log"), host.reading)
        return OomFinding("not-oom", "certain", lines)
    if group is not None and group.recent > 0:
        return _counted_in_group(evidence, death, group)
    if host is not None and host.recent > 0:
        return _counted_on_machine(evidence, death, group, host)
    if host is not None:  # all that was counted belongs to earlier deaths, which were recorded then
        return OomFinding("not-oom", "likely", (host.reading,))
    if group is not None:
        return OomFinding("not-oom", "likely", (group.reading,))
    return OomFinding("open", "possible", (), "the kernel's OOM counters could not be read")


def unrecorded_victim(evidence: Evidence, pids: list[int]) -> tuple[ProcessDeath, OomFinding] | None:
    """An OOM kill of a child that lived too shortly to be followed: by the pid the parent names, or of any child."""
    own = evidence.own_death
    group = _delta(evidence, own, "cgroup")
    for pid in [*pids, *([] if pids else sorted(_read_log(evidence, own).victims))]:
        child = own._replace(pid=pid, name="a child process", status=Status(), rss=None)
        finding = examine(evidence, child)
        # A victim that only the log names may be a neighbour's, unless it died in our own group.
        if finding.answer == "oom" and (pids or (group is not None and group.recent > 0)):
            sure = pids and finding.grade == "certain"
            return child, finding if sure else finding._replace(grade="likely")
    if group is None or not group.recent or _foreign(mapping(evidence.death.get("cgroup"))) is not None:
        return None
    child = own._replace(pid=pids[0] if pids else None, name="a child process", status=Status(), rss=None)
    return child, OomFinding("oom", "likely", (group.reading,))


def describe_limit(evidence: Evidence) -> tuple[int | None, int | None]:
    """The memory limit of the attempt and the most that was used of it, as far as known."""
    group = mapping(evidence.death.get("cgroup"))
    sample = evidence.last_sample
    limit = count(group.get("limit")) or count(sample.get("cgroup_limit"))
    seen = [count(row.get("cgroup_used")) or 0 for row in evidence.samples]
    # What is used after the death says nothing of the time before it, where no sample does.
    peak = max([count(group.get("used")) or 0, *seen]) or None if seen else None
    return limit, peak


class _Delta(NamedTuple):
    total: int
    """Since the attempt began."""
    recent: int
    """Since the last recorded death before this one."""
    reading: Reading


class _Log(NamedTuple):
    lines: tuple[tuple[int, str, float | None], ...]  # pid, text, time
    victims: frozenset[int]
    others: str

    def naming(self, pid: int | None) -> tuple[Reading, ...]:
        found = [line for line in self.lines if line[0] == pid]
        # Two lines speak of each kill; the one with the sizes says more.
        found.sort(key=lambda line: "Killed process" not in line[1])
        return tuple(Reading(printable(line[1], 200), "kernel log") for line in found[:1])


def _read_log(evidence: Evidence, death: ProcessDeath) -> _Log:
    """The OOM lines, if their pids are ours to compare: in a PID namespace the kernel speaks of others."""
    if evidence.attempt.get("initial_pid_namespace") is not True:
        return _Log((), frozenset(), "")
    found: dict[tuple[int, str], tuple[int, str, float | None]] = {}
    for line in (*death.lines, *evidence.own_death.lines):
        parsed = parse_oom_kill(str(line["text"]))
        pid = count(parsed.get("pid")) if parsed else None
        if pid is not None:
            found[pid, str(line["text"])] = (pid, str(line["text"]), number(line.get("t")))
    lines = tuple(found.values())
    victims = frozenset(line[0] for line in lines) - {death.pid or -1}
    names = ", ".join(f"pid {pid}" for pid in sorted(victims)[:3])
    return _Log(lines, victims, f"the kernel log names {names} as killed, not pid {death.pid}")


def _delta(evidence: Evidence, death: ProcessDeath, which: str) -> _Delta | None:
    counter = mapping(death.counters.get(which))
    before, after = count(counter.get("before")), count(counter.get("after"))
    if before is None or after is None or after < before:
        return None
    base = max(before, *_earlier_counts(evidence, death, which, after))
    where = f"memory group {text(counter.get('path'))}" if which == "cgroup" else "whole machine"
    words = f"unchanged at {after}" if after == before else f"{before} -> {after}"
    reading = Reading(f"oom_kill counter of the {where}: {words}", death.source, death.wall)
    return _Delta(after - before, after - base, reading)


def _earlier_counts(evidence: Evidence, death: ProcessDeath, which: str, most: int) -> list[int]:
    """What the counter is known to have shown some seconds before this death: those kills are others'."""
    if death.t is None:
        return [0]
    latest = death.t - _SAME_MOMENT
    counter = mapping(death.counters.get(which))
    found = [0]
    for earlier in _others(evidence):
        known = mapping(earlier.counters.get(which))
        if earlier.t is not None and earlier.t <= latest and known.get("path") == counter.get("path"):
            found.append(count(known.get("after")) or 0)
    group = mapping(death.counters.get("cgroup"))
    # Samples hold the group's counter where there is one, else the machine's, which counts the group's kills too.
    offset = 0
    if which == "host" and group:
        offset = (count(counter.get("before")) or 0) - (count(group.get("before")) or 0)
    for row in evidence.samples:
        t, seen = number(row.get("t")), count(row.get("oom_kills"))
        if t is not None and seen is not None and t <= latest:
            found.append(seen + offset)
    return [min(value, most) for value in found]


def _counted_in_group(evidence: Evidence, death: ProcessDeath, group: _Delta) -> OomFinding:
    state = mapping(evidence.death.get("cgroup"))
    if state.get("group_kill") is True and death.status.known:
        whole = Reading("memory.oom.group: a kill takes the whole group", "death.json")
        return OomFinding("oom", "certain", (group.reading, whole))
    foreign, large = _foreign(state), _holds_most(evidence, death)
    if foreign is None or large:
        # Never certain without the log: a child or neighbour too short-lived to be seen may be the one counted,
        # while somebody killed this one. The longer nobody else was seen, the less likely that is.
        watched = large or (evidence.ran_for or 0.0) >= _WATCHED
        sole = group.recent > len(_rivals(evidence, death))
        reading = memory_reading(evidence) if describe_limit(evidence)[0] is not None else None
        grade: Grade = "likely" if watched and sole and evidence.lost_samples is None else "possible"
        return OomFinding("oom", grade, (group.reading, *([reading] if reading else [])))
    return OomFinding(
        "open", "possible", (group.reading, Reading(foreign, "death.json")),
        "a process was OOM-killed in this memory group at that time, but it may have been another one",
    )  # fmt: skip


def _counted_on_machine(
    evidence: Evidence, death: ProcessDeath, group: _Delta | None, host: _Delta
) -> OomFinding:
    if group is not None:
        for parent in mappings(death.counters.get("cgroup_parents")):
            before, after = count(parent.get("before")), count(parent.get("after"))
            if before is not None and after is not None and after > before:
                return OomFinding(
                    "open", "possible", (group.reading, host.reading),
                    "a parent memory group counted an OOM kill, which may have hit another process",
                )  # fmt: skip
        # Killed in another group: a neighbour's, unless the process had been moved there unseen.
        return OomFinding("not-oom", "likely", (group.reading, host.reading))
    reading = memory_reading(evidence) if describe_limit(evidence)[0] is not None else None
    return OomFinding("oom", "likely", (host.reading, *([reading] if reading else [])))


def _foreign(state: dict[str, Any]) -> str | None:
    """Why a foreign process may have been the victim; None when none was there."""
    processes = state.get("foreign")
    # Nobody looks in a group without limit.
    if not isinstance(processes, list) or not count(state.get("limit")):
        return "it is not known which other processes were in that memory group"
    if processes:
        first = mappings(processes)[:1]
        name = printable(text(first[0].get("name")) or "a process", 60) if first else "a process"
        return f"{len(processes)} other process(es) in that memory group: {name}"
    age = number(state.get("foreign_age"))
    if age is not None and age < _LATELY:
        return f"another process was in that memory group {format_duration(age)} before"
    return None


def _others(evidence: Evidence) -> list[ProcessDeath]:
    """The recorded deaths around this one: of its children and of what had started it."""
    parent = evidence.parent_death
    return [*evidence.child_deaths, *([parent.death] if parent is not None else [])]


def _rivals(evidence: Evidence, death: ProcessDeath) -> list[ProcessDeath]:
    """Other processes of the tree that died at the same moment and may be the ones that were counted."""
    deaths = [*_others(evidence), evidence.own_death]
    return [
        other
        for other in deaths
        if other.pid != death.pid
        and other.status.signal in (None, SIGKILL)
        and other.status.exit_code is None
        and other.t is not None
        and death.t is not None
        and death.t - _SAME_MOMENT <= other.t <= death.t + 0.05
    ]


def _holds_most(evidence: Evidence, death: ProcessDeath) -> bool:
    limit, _ = describe_limit(evidence)
    return bool(limit and death.rss and death.rss >= limit / 2)


def memory_reading(evidence: Evidence) -> Reading | None:
    """The memory as last seen. Where more is known to have been held, the sample came too early: then with its age."""
    from buoy.units import format_share

    limit, peak = describe_limit(evidence)
    if peak is None:
        return None
    words = f"memory last seen: {format_share(peak, limit)}"
    if _held_at_the_end(evidence, limit) > _CONTRADICTED * peak:
        seen = number(evidence.last_sample.get("t"))
        if limit is None or seen is None or evidence.died_t is None:
            return None
        words += f", {format_duration(max(0.0, evidence.died_t - seen))} before the end"
    return Reading(words, "samples", number(evidence.last_sample.get("wall")) or evidence.last_wall)


def _held_at_the_end(evidence: Evidence, limit: int | None) -> int:
    """The most that one process is known to have held: by the kernel's own line, or by the last look at each.

    Under a limit only the first counts: what a look at a process shows holds file pages that the limit does not count.
    """
    named = [parse_oom_kill(str(line["text"])) for line in evidence.own_death.lines]
    held = [count(found.get("anon_rss")) for found in named if found and found.get("pid") == evidence.pid]
    if limit is None:
        held += [count(process.get("rss")) for process in mappings(evidence.death.get("processes"))]
    return max((size for size in held if size is not None), default=0)
