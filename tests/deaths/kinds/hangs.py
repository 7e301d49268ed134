"""Trainings that do not die: asked about while they hang, then killed and asked about again."""

from __future__ import annotations

from tests.deaths import acts
from tests.deaths.kind import Act, Kind, Launch, expect
from tests.deaths.kinds.memory import KILLED

_HANGS = expect("hang", at_least="certain")
_SOON = (("BUOY_HANG_SECONDS", "1"),)


def _kind(name: str, program: str, launch: Launch, act: Act = acts.hang) -> Kind:
    return Kind(
        f"hang-{name}-{launch}",
        (program,),
        launch,
        act,
        KILLED,
        alive=_HANGS,
        says="it had hung since step",
        steps=10,
        environment=_SOON,
    )


KINDS = (
    _kind("deadlock", "deadlock.py", "run"),
    _kind("deadlock", "deadlock.py", "watch"),
    _kind("blocked-recv", "blocked_recv.py", "run"),
    _kind("blocked-recv", "blocked_recv.py", "watch"),
    _kind("busy-in-python", "busy_python.py", "run"),
    _kind("busy-in-c-with-gil", "busy_c.py", "run"),
    _kind("busy-in-c-with-gil", "busy_c.py", "watch"),
    _kind("exception-in-thread", "exception_in_thread.py", "watch"),
    _kind("stopped", "stepping.py", "run", acts.stop_then_kill),
    _kind("stopped", "stepping.py", "watch", acts.stop_then_kill),
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
