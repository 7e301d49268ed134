"""The sidecar: a small process of its own that samples the training, warns, and writes down how it died.

Run as `python -I -S sidecar.py ATTEMPT_FOLDER PID READY_FD [OUR_PIDS...]` by `start.start_sidecar`. It uses the
standard library only and belongs to no session or process group of the training; no failure of it reaches the training.
"""

from __future__ import annotations

import os
import select
import sys
import time

if __name__ == "__main__":  # started by path: make `import buoy` find the package this file belongs to, last
    sys.path[0:1] = []
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from buoy.flight.alarms.stall import wants_stacks
from buoy.flight.alarms.warnings import Alarms
from buoy.flight.death import Parent, counter_change, exit_status, gather, role
from buoy.flight.log import EventLog, SampleLog
from buoy.flight.mirror import Mirrors
from buoy.flight.privacy import mask_text
from buoy.flight.sampler import Sampler
from buoy.flight.stacks import Holders, StackAsker
from buoy.machine.cgroup import ColabEvents
from buoy.machine.files import append, read_json, write_json
from buoy.machine.kernel_log import KernelLog
from buoy.machine.process import step_back

_NICE = 5
_GAP_SECONDS = 2.0
_CLOCK_JUMP_SECONDS = 2.0
_KERNEL_LINES_MOST = 200
_CHILD_PATIENCE = 0.01
"""Seconds to wait for a child's status: thousands of children may come and go."""


class Sidecar:
    """Watches one process until it dies."""

    def __init__(self, folder: str, pid: int, ours: tuple[int, ...]) -> None:
        self._folder = folder
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._attempt = read_json(os.path.join(folder, "attempt.json")) or {}
        self._kernel_log = KernelLog()
        self._kernel_lines: list = []  # type: ignore[type-arg]
        self._colab = ColabEvents()
        command = self._attempt.get("command") if self._attempt.get("mode") == "run" else None
        name = " ".join(map(str, command))[:80] if isinstance(command, list) else ""
        self._sampler = Sampler(pid, folder, os.path.dirname(os.path.dirname(folder)), name, ours)
        self._samples = SampleLog(folder)
        self._events = EventLog(folder)
        self._before = self._sampler.counters()
        self._alarms = Alarms(self._attempt, self._sampler)
        self._stacks = StackAsker(self._events)
        self._holders = Holders(folder, self._events, self._sampler)
        self._mirrors = Mirrors(folder, self._attempt.get("mirror"), self._attempt.get("mirror_mount"))
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._child_pidfds: dict[int, int] = {}  # descriptor -> pid
        self._parent = Parent(pid)
        if self._parent.pidfd >= 0:
            self._poll.register(self._parent.pidfd, select.POLLIN)
        self._last = self._before_last = time.monotonic()
        self._failed_ticks = 0
        self._longest_gap = 0.0
        self._clock_offset = time.time() - time.monotonic()
        self._events.add(
            "start",
            sidecar=os.getpid(),
            counters=self._before,
            kernel_log={"readable": self._kernel_log.readable, "reason": self._kernel_log.reason},
        )

    def run(self) -> None:
        """Sample until the process is dead, then gather, judge and leave."""
        due = time.monotonic()
        while True:
            now = time.monotonic()
            self._check_clock(now)
            try:
                self._tick(now)
            except Exception:  # noqa: BLE001 - a sample is lost; the evidence at the death must not be
                self._failed_ticks += 1
                if self._failed_ticks == 1:
                    _log_failure(self._folder)
            due = max(due + 1.0 / self._sampler.hz, now)
            if self._wait(due):
                break
        self._settle()

    def _tick(self, now: float) -> None:
        sample = self._sampler.sample(now)
        self._samples.add(sample)
        self._before_last, self._last = self._last, now
        self._follow_children()
        warnings = self._alarms.feed(now, sample)
        for warning in warnings:
            self._events.add("warning", alarm=warning.alarm, text=warning.text, values=warning.values)
            _warn(warning.text)
        for kind, values in self._alarms.take_events():
            self._events.add(kind, **values)
            if kind == "hang" and wants_stacks(values):
                self._stacks.ask(self._sampler.lead_pid, "hang")
        self._stacks.near_exhaustion(self._sampler.pressure, self._sampler.lead_pid, now)
        named = self._holders.tick(now, [warning.alarm for warning in warnings])
        if named is not None:
            _warn(named)
        self._mirrors.tick(now, alarm=bool(warnings) or named is not None)
        for home, trouble in self._mirrors.new_troubles():
            text = f"cannot copy to mirror {home} ({trouble}); recording continues locally"
            self._events.add("warning", alarm="mirror", text=text, values={})
            _warn(text)

    def _check_clock(self, now: float) -> None:
        gap = now - self._last
        self._longest_gap = max(self._longest_gap, gap)
        if gap > _GAP_SECONDS:
            self._events.add("gap", seconds=round(gap, 3))
        offset = time.time() - now
        if abs(offset - self._clock_offset) > _CLOCK_JUMP_SECONDS:
            self._events.add("clock", jump=round(offset - self._clock_offset, 3))
        self._clock_offset = offset

    def _wait(self, due: float) -> bool:
        """Sleep until the next sample; True when the training has died."""
        while True:
            remaining = due - time.monotonic()
            ready = self._poll.poll(max(0.0, remaining * 1000))
            if not ready:
                return False
            if any(descriptor == self._pidfd for descriptor, _ in ready):
                return True
            for descriptor, _ in ready:
                self._other_died(descriptor)

    def _follow_children(self) -> None:
        known = set(self._child_pidfds.values())
        for pid in list(self._sampler.children):
            if pid not in known:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:  # it lived too shortly to be followed
                    self._sampler.forget(pid)
                    continue
                except OSError:
                    continue
                self._child_pidfds[descriptor] = pid
                self._poll.register(descriptor, select.POLLIN)

    def _other_died(self, descriptor: int, together: bool = False) -> None:
        """A child or the parent; `together`: seen in the same look as the death itself, so in no known order."""
        if descriptor == self._parent.pidfd:
            self._parent_died(together)
        else:
            self._child_died(descriptor)

    def _parent_died(self, together: bool) -> None:
        parent = self._parent
        assert parent.pid is not None
        self._poll.unregister(parent.pidfd)
        status, source = exit_status(parent.pid, parent.pidfd, patience=_CHILD_PATIENCE)
        lines = self._kernel_log.read_new()
        self._kernel_lines.extend(lines)
        self._events.add(
            "parent-death",
            **parent.describe(status, source),
            together=together,
            counters=counter_change(self._before, self._sampler.counters()),
            kernel_log=lines,
        )
        parent.close()

    def _child_died(self, descriptor: int) -> None:
        pid = self._child_pidfds.pop(descriptor)
        self._poll.unregister(descriptor)
        status, source = exit_status(pid, descriptor, patience=_CHILD_PATIENCE)
        os.close(descriptor)
        lines = self._kernel_log.read_new()
        self._kernel_lines.extend(lines)
        del self._kernel_lines[:-_KERNEL_LINES_MOST]
        if status != 0:
            self._events.add(
                "process-death",
                pid=pid,
                name=mask_text(self._sampler.names.get(pid, "?")),
                role=role(self._sampler, pid),
                status=status,
                source=source,
                since=round(self._before_last, 4),
                rss=self._sampler.rss.get(pid),
                counters=counter_change(self._before, self._sampler.counters()),
                kernel_log=lines,
                instrumented=pid in self._sampler.beacons,
            )
        self._sampler.forget(pid)

    def _settle(self) -> None:
        _raise_priority()
        for descriptor, _ in self._poll.poll(0):  # who died in the same moment
            if descriptor != self._pidfd:
                self._other_died(descriptor, together=True)
        evidence = gather(
            self._sampler, self._pidfd, self._attempt, self._folder, self._before, self._kernel_log,
            self._kernel_lines, self._colab, self._samples.newest, self._longest_gap,
        )  # fmt: skip
        try:
            os.unlink(os.path.join(self._folder, "reserve"))  # room for what follows, on a full disk too
        except OSError:
            pass
        self._holders.hear_last()
        self._samples.flush()
        self._events.add("end")
        write_json(os.path.join(self._folder, "death.json"), evidence)
        from buoy.verdict import settle  # only now: it is larger than the whole sampling loop

        settle(self._folder)
        self._mirrors.last_copy()


def _warn(text: str) -> None:
    """One line on the training's stderr, or silence: never wait for a pipe that nobody empties."""
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        ready = poll.poll(0)
        if ready and ready[0][1] & select.POLLOUT:
            os.write(2, f"buoy: {text}\n".encode()[:480])
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """Detach, take the first readings, say that we are ready, and watch."""
    folder, pid, ready = arguments[0], int(arguments[1]), int(arguments[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    _lower_priority()
    try:
        sidecar = Sidecar(folder, pid, tuple(map(int, arguments[3:])))
        os.write(ready, b"%d" % os.getpid())
        os.close(ready)
        sidecar.run()
    except Exception:  # noqa: BLE001 - the last line of defence: leave word of it and go
        _log_failure(folder)


def _lower_priority() -> None:
    step_back(_NICE)
    try:
        # Allowed to root only; elsewhere it stays as it is.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-500")
    except OSError:
        pass


def _raise_priority() -> None:
    """The training is dead: nothing is left to be modest for, and evidence fades. Only root may ask for this."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except OSError:
        pass


def _log_failure(folder: str) -> None:
    import traceback

    try:
        append(os.path.join(folder, "sidecar.log"), traceback.format_exc())
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
