"""`buoy run`: the parent of an unmodified script. It forwards signals once, learns the exact status, and restarts.

A second start of a run that is being trained is refused, and must not hide the training that lives.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from buoy.errors import RunFolderError
from buoy.flight.attempt import Attempt, discard, new_attempt
from buoy.flight.log import note, read_events
from buoy.machine import procfs
from buoy.machine.files import write_json
from buoy.supervisor.launch import Child, Terminal
from buoy.supervisor.start import describe_attempt, start_sidecar, write_attempt
from buoy.supervisor.upkeep import is_gone
from buoy.text import printable, typed
from buoy.verdict.advice import from_here
from buoy.verdict.model import Verdict

REFUSED = "refused"
"""The event by which a process says that another one trains the run it asked for."""
_WORK = ("opened", "training", "save", "loop")


def is_refused(attempt: Attempt) -> bool:
    """Whether all that this attempt did was to ask for a run that another process trains."""
    kinds = {event.get("kind") for event in read_events(attempt.folder)}
    return REFUSED in kinds and not kinds.intersection(_WORK)


_FORWARDED = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH,
}  # fmt: skip
_ASKS_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_HANDLED = {*_FORWARDED, signal.SIGCHLD}
_LOOK_AFTER_SIDECAR = 2.0
_SIDECAR_RESTARTS = 3
_SIDECAR_SECONDS = 3.0
"""Patience with a sidecar at its end: it judges, and then brings the mirror up to date."""
_VERDICT_SECONDS = 10.0
"""Patience while it has not judged yet, as on a machine that is busy."""


@dataclass(frozen=True)
class Order:
    """What `buoy run` was asked to do."""

    command: list[str]
    run_folder: str
    mirror: str | None = None
    time_limit: float | None = None
    restart: int = 0
    say: Callable[[str], None] = field(default=lambda text: None)
    """Shows a line to the user; stderr in the command line."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    status: int
    verdict: Verdict | None
    asked_to_stop: bool


def supervise(order: Order) -> int:
    """Run the command, again after deaths that can be survived, and return its exit code."""
    best_step: int | None = None
    before: Outcome | None = None
    restarts = 0
    began = time.time()
    while True:
        life = _Life(order, new_attempt(order.run_folder), began, restarts)
        outcome = life.live()
        try:
            again = _look_back(order, life.attempt, outcome, restarts, best_step, before)
        except Exception as error:  # noqa: BLE001 - the command has ended: its own code is what counts now
            order.say(f"buoy: could not analyse this attempt: {error!r}")
            again = False
        if not again:
            return exit_code(outcome.status)
        restarts += 1
        step, before = _last_step(outcome), outcome
        best_step = step if best_step is None else max(best_step, step or 0)


def _look_back(
    order: Order,
    attempt: Attempt,
    outcome: Outcome,
    restarts: int,
    best_step: int | None,
    before: Outcome | None,
) -> bool:
    """Tell how it ended, and whether there is a further attempt."""
    if outcome.status == 0:
        return False
    order.say("")  # the command may have left a progress bar without the end of its line
    if not outcome.asked_to_stop and is_refused(attempt) and discard(attempt):
        order.say("buoy: this start is not recorded: another process is already training that run")
        return False
    step, saved = _last_step(outcome), saved_something(attempt)
    reason = _why_not_again(order, outcome, restarts, step, saved, best_step) if order.restart else None
    if (
        order.restart and reason is None and (step is not None or not saved)
    ):  # else it may well have got further
        reason = _same_end(before, outcome, step, best_step)
    again = bool(order.restart) and reason is None
    if order.restart:  # before it is reported: what to do depends on it
        note(attempt.folder, "restart", again=again, why=reason)
    run = _report(order, attempt, outcome.verdict) if outcome.verdict is not None else None
    if again:
        _announce_restart(order, restarts, step, saved)
    elif reason is not None:
        order.say(f"buoy: not restarted: {reason}")
    if run is not None and not again:
        name = typed(from_here(run))
        order.say(f"buoy: details: `buoy why {name}`; charts: `buoy report {name}`")
    return again


def _announce_restart(order: Order, restarts: int, step: int | None, saved: bool) -> None:
    if step is None and not saved:
        place = "; no step was counted and no save seen, so buoy does not know whether it makes progress"
    else:
        place = f" after step {step}" if step is not None else ""
        place += "" if saved else "; the script saved nothing that buoy saw, so it starts over"
    order.say(f"buoy: restart {restarts + 1} of {order.restart}{place}")


def _why_not_again(
    order: Order, outcome: Outcome, restarts: int, step: int | None, saved: bool, best_step: int | None
) -> str | None:
    """Why there is no further attempt, or None when there is one."""
    if outcome.asked_to_stop:
        return "it was asked to stop"
    if outcome.verdict is None or not outcome.verdict.cause.survivable:
        return "starting it again would not help"
    if restarts >= order.restart:
        return f"it was restarted {'once' if restarts == 1 else f'{restarts} times'} already"
    if best_step is not None and not saved and (step or 0) <= best_step:
        return f"it got no further than step {best_step} of the previous attempt"
    return None


def _same_end(
    before: Outcome | None, outcome: Outcome, step: int | None, best_step: int | None
) -> str | None:
    """That it died twice in one way at one place and got no further: the third time it would too."""
    if before is None or before.verdict is None or outcome.verdict is None or (step or 0) > (best_step or 0):
        return None
    first, second = before.verdict, outcome.verdict
    # Only a place of the death itself counts: stacks from some time before tell where it was then.
    places = [
        (end.cause.id, end.where.file, end.where.line, end.where.seconds_before) for end in (first, second)
    ]
    if second.where.file is None or second.where.seconds_before is not None or places[0] != places[1]:
        return None
    at = printable(f"{second.where.file}:{second.where.line}", 80)
    return f"it died twice in the same way ({second.cause.id}) at the same place, {at}, and would again"


def _last_step(outcome: Outcome) -> int | None:
    return outcome.verdict.where.step if outcome.verdict is not None else None


def saved_something(attempt: Attempt) -> bool:
    """Whether the script was seen to save during this attempt."""
    return any(event.get("kind") == "save" for event in read_events(attempt.folder))


def exit_code(status: int) -> int:
    """A shell's view of a wait status: the program's own code, 128+N for signal N."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _report(order: Order, attempt: Attempt, verdict: Verdict) -> str | None:
    """Say how it ended, and return the folder of the run that it was at, by which the user knows it."""
    from buoy.verdict import record, verdict_on
    from buoy.verdict.advice import with_restart
    from buoy.verdict.evidence import load
    from buoy.verdict.select import Asked
    from buoy.view.verdict import render

    try:
        evidence = load(attempt.folder)
        if order.restart:
            verdict = with_restart(verdict, evidence)
            record(verdict, attempt.folder)
        verdict = verdict_on(Asked(attempt, attempt.run_folder, True), evidence, verdict)
        order.say(render(verdict, "concise"))
    except Exception as error:  # noqa: BLE001 - a message only: whether it is restarted was decided before
        order.say(f"buoy: cannot report how it ended: {error!r}")
        return None
    return verdict.run


class _Life:
    """One attempt: from the fork to the verdict."""

    def __init__(self, order: Order, attempt: Attempt, began: float, restarts: int) -> None:
        self._order = order
        self.attempt = attempt
        """Another than at the start where its folder went under it."""
        self._is_given_up = False
        self._began = began
        self._restarts = restarts
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        self._terminal = Terminal()
        self._forwarded: list[int] = []
        self._sidecar: int | None = None
        self._sidecar_fd: int | None = None
        self._sidecar_starts = 0
        self._asked_to_stop = False
        self._pid = 0

    def live(self) -> Outcome:
        try:
            child = Child(self._order.command, self.attempt.folder, set(_HANDLED) - set(self._mask))
            self._pid = child.pid
            try:
                self._prepare()
                self._terminal.lend(child.pid)
                child.release()
            except BaseException:
                self._undo()
                raise
            status = self._wait()
            self._terminal.take_back()
            verdict = self._settle(status)
            return Outcome(status, verdict, self._asked_to_stop)
        finally:
            self._terminal.take_back()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _undo(self) -> None:
        """It never began: leave no attempt behind that a user would be shown."""
        for pid in (self._sidecar, self._pid):
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass
        discard(self.attempt)

    def _prepare(self) -> None:
        order = self._order
        description = describe_attempt(
            self.attempt, "run", self._pid, order.command, order.mirror, order.time_limit
        )
        if order.time_limit is not None:
            description["session_started"] = self._began  # a restart does not begin a new session
        if order.restart:
            description["restart"] = {"allowed": order.restart, "done": self._restarts}
        try:
            write_attempt(description, self.attempt)
        except OSError as error:
            raise RunFolderError(
                "cannot write the run folder",
                received=f"{self.attempt.folder} ({error.strerror})",
                expected="a folder with at least 1 MiB of free space",
                hint="choose another with `--run DIR`",
                exit_code=125,
            ) from error
        self._start_sidecar()

    def _start_sidecar(self) -> None:
        self._sidecar_starts += 1
        self._sidecar = start_sidecar(self.attempt, self._pid, os.getpid())
        try:
            self._sidecar_fd = os.pidfd_open(self._sidecar) if self._sidecar is not None else None
        except OSError:
            self._sidecar_fd = None
        if self._sidecar is None:
            self._order.say("buoy: the recorder did not start; the command runs without samples")

    def _wait(self) -> int:
        """Forward signals until the child is dead; its raw status. It stays a zombie for the sidecar to read."""
        while True:
            information = signal.sigtimedwait(_HANDLED, _LOOK_AFTER_SIDECAR)
            if information is not None and information.si_signo in _FORWARDED:
                self._forward(information)
            state = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if state is None:
                self._look_after_folder()
                self._look_after_sidecar()
            elif state.si_code == os.CLD_STOPPED:
                os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG)  # seen: do not report it again
                if self._terminal.is_lent:
                    self._stop_with_child()
            else:
                return _raw_status(state.si_code, state.si_status)

    def _forward(self, information: signal.struct_siginfo) -> None:
        number = information.si_signo
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGWINCH:
            return
        self._forwarded.append(number)
        self._asked_to_stop = self._asked_to_stop or number in _ASKS_TO_STOP
        note(
            self.attempt.folder,
            "signal",
            signal=signal.Signals(number).name,
            from_pid=information.si_pid or None,
        )

    def _stop_with_child(self) -> None:
        """Ctrl-Z stopped the child: stop with it, and continue with it, as a shell's job does."""
        self._terminal.take_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.lend(self._pid)
        os.killpg(self._pid, signal.SIGCONT)

    def _look_after_folder(self) -> None:
        """Begin a new recording where the folder was moved or removed; what trains finds it by its next steps."""
        if self._is_given_up or not is_gone(self.attempt.folder):
            return
        if self._sidecar_fd is not None:  # it would write an end that nobody finds
            try:
                signal.pidfd_send_signal(self._sidecar_fd, signal.SIGTERM)
            except ProcessLookupError:
                pass  # it has ended by itself
            os.close(self._sidecar_fd)
            self._sidecar_fd = None
        run_folder = self.attempt.run_folder
        # Where all around it went with it, making it there again would only litter.
        self._is_given_up = is_gone(os.path.dirname(os.path.dirname(run_folder)))
        rest = "; nothing is recorded, your command keeps running" if self._is_given_up else ""
        self._order.say(f"buoy: the folder of the recording is gone: {run_folder}{rest}")
        if self._is_given_up:
            return
        try:
            self.attempt, self._sidecar_starts = new_attempt(run_folder), 0
            self._prepare()
        except Exception as error:  # noqa: BLE001 - the command must not end with its recording
            self._is_given_up = True
            self._order.say(f"buoy: nothing is recorded, your command keeps running: {error}")
            return
        self._order.say(f"buoy: a new recording starts in {run_folder}")

    def _look_after_sidecar(self) -> None:
        if self._sidecar_fd is None or not select.select([self._sidecar_fd], [], [], 0)[0]:
            return
        os.close(self._sidecar_fd)
        self._sidecar_fd = None
        if self._sidecar_starts > _SIDECAR_RESTARTS:
            self._order.say(
                "buoy: the recorder crashed again and will not be restarted; your command keeps running"
            )
            return
        self._start_sidecar()
        note(self.attempt.folder, "sidecar", what="restarted", times=self._sidecar_starts - 1)

    def _settle(self, status: int) -> Verdict | None:
        """The sidecar's verdict; our own only where that one could not judge, or did not learn the exact status."""
        from buoy.verdict import settle, settled

        record = {
            "schema": "buoy.exit/1",
            "t": time.monotonic(),
            "wall": time.time(),
            "pid": self._pid,
            "status": status,
            "forwarded": self._forwarded,
        }
        self._record({**record, "rusage": procfs.cpu_times(self._pid)})
        self._wait_for_sidecar()
        _, _, exact = os.wait4(self._pid, 0)
        record["rusage"] = {
            "utime": exact.ru_utime,
            "stime": exact.ru_stime,
            "maxrss": exact.ru_maxrss * 1024,
            "majflt": exact.ru_majflt,
        }
        self._record(record)
        try:
            found = settled(self.attempt.folder)
            return found if found is not None else settle(self.attempt.folder)
        except Exception as error:  # noqa: BLE001 - the child has ended: its code is what counts now
            gone = not os.path.isdir(self.attempt.folder)
            reason = f"the run folder {self.attempt.run_folder} is gone" if gone else repr(error)
            self._order.say(f"buoy: no verdict: {reason}")
            return None

    def _wait_for_sidecar(self) -> None:
        """Until it has ended; or, where its mirror keeps it, for as long as a verdict may take."""
        if self._sidecar_fd is None:
            return
        began, verdict = time.monotonic(), os.path.join(self.attempt.folder, "verdict.json")
        patience = _SIDECAR_SECONDS
        while not select.select([self._sidecar_fd], [], [], patience)[0]:
            if os.path.exists(verdict) or time.monotonic() - began > _VERDICT_SECONDS:
                break
            patience = 0.1
        os.close(self._sidecar_fd)
        self._sidecar_fd = None

    def _record(self, record: dict[str, object]) -> None:
        try:
            write_json(os.path.join(self.attempt.folder, "exit.json"), record)
        except OSError:
            pass  # a full disk: the sidecar's reserve still takes the verdict


def _raw_status(code: int, status: int) -> int:
    if code == os.CLD_EXITED:
        return status << 8
    return status | 0x80 if code == os.CLD_DUMPED else status
