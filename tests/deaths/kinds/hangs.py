"""Trainings that do not die: asked about while they hang, then killed and asked about again."""

from __future__ import annotations

from tests.deaths import acts
from tests.deaths.kind import Act, Kind, Launch, expect
from tests.deaths.kinds.memory import KILLED

_HANGS = expect("hang", at_least="certain")
_MAY_HANG = expect("hang<=possible")  # it computes: a long step looks the same
_COMPUTED = "while it computed"
_STOPPED = "it had been stopped by a signal"
_SOON = (("BUOY_HANG_SECONDS", "1"),)


def _kind(
    name: str, program: str, launch: Launch, act: Act = acts.hang, says: str = "it had hung since step"
) -> Kind:
    return Kind(
        f"hang-{name}-{launch}",
        (program,),
        launch,
        act,
        KILLED,
        alive=_MAY_HANG if says == _COMPUTED else _HANGS,
        says=says,
        steps=10,
        environment=_SOON,
    )


KINDS = (
    _kind("deadlock", "deadlock.py", "run"),
    _kind("deadlock", "deadlock.py", "watch"),
    _kind("blocked-recv", "blocked_recv.py", "run"),
    _kind("blocked-recv", "blocked_recv.py", "watch"),
    _kind("busy-in-python", "busy_python.py", "run", says=_COMPUTED),
    _kind("busy-in-c-with-gil", "busy_c.py", "run", says=_COMPUTED),
    _kind("busy-in-c-with-gil", "busy_c.py", "watch", says=_COMPUTED),
    _kind("exception-in-thread", "exception_in_thread.py", "watch"),
    _kind("stopped", "stepping.py", "run", acts.stop_then_kill, _STOPPED),
    _kind("stopped", "stepping.py", "watch", acts.stop_then_kill, _STOPPED),
    Kind(
        "slow-step-then-clean-exit-run",
        ("slow_step.py",),
        "run",
        acts.cue,
        expect("clean-exit"),
        environment=_SOON,
    ),
    Kind(
        "slow-step-then-clean-exit-watch",
        ("slow_step.py",),
        "watch",
        acts.cue,
        expect("clean-exit"),
        environment=_SOON,
    ),
)
