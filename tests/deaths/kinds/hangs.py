"""Trainings that do not die: asked about while they hang, or only seem to, then killed and asked about again."""

from __future__ import annotations

from tests.deaths import acts
from tests.deaths.kind import Act, Expected, Kind, Launch, expect
from tests.deaths.kinds.memory import KILLED

_HANGS = expect("hang", at_least="certain")
# It computes: a long step looks the same. On a crowded machine it is starved as well.
_MAY_HANG = expect("hang<=possible starved<=likely")
_SEEMS_TO_HANG = expect("hang<=likely", at_least="likely")  # something outside, or a clock, may yet end it
_STARVED = expect("starved", at_least="likely")  # certain, where the machine was idle before
_SHORT_OF_CPU = expect("starved<=likely", at_least="likely")  # an endless loop looks the same
_STARTING = expect("still-running")
_COMPUTED = "while it computed"
_STOPPED = "it had been stopped by a signal"
_SOON = (("BUOY_HANG_SECONDS", "0.5"),)


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


def _still(
    name: str,
    how: str,
    launch: Launch,
    alive: Expected,
    says: str = "",
    act: Act = acts.hang,
    needs: tuple[str, ...] = (),
) -> Kind:
    return Kind(
        f"{name}-{launch}",
        ("standing_still.py", how),
        launch,
        act,
        KILLED,
        alive=alive,
        says=says,
        environment=_SOON,
        needs=needs,
    )


KINDS = (
    *(
        _still(
            f"starved-in-{how.replace('_', '-')}-at-{percent}-percent",
            how,
            launch,
            alive,
            says,
            acts.starve(percent),
            ("cpu-cgroup",),
        )
        for how, percent, launch, alive, says in (
            ("a_step", 1, "run", _STARVED, "of CPU"),
            ("long_work", 5, "watch", _SHORT_OF_CPU, "short of CPU while it computed"),
        )
    ),
    _still("starved-by-neighbours", "a_step", "run", _STARVED, "of CPU", acts.crowd_out),
    _still("hang-two-locks", "two_locks", "run", _HANGS, "it had hung since step"),
    _still("hang-empty-pipe", "empty_pipe", "watch", _HANGS, "it had hung since step"),
    _still("hang-stuck-child", "stuck_child", "run", _HANGS, "it had hung since step"),
    _still("hang-lock-of-a-sleeper", "sleeping_owner", "run", _SEEMS_TO_HANG, "it had hung since step"),
    _still("hang-silent-peer", "silent_peer", "watch", _SEEMS_TO_HANG, "it had hung since step"),
    _still(
        "slow-socket",
        "slow_socket",
        "run",
        expect("waiting", at_least="certain"),
        "it had waited for the network",
    ),
    _still("slow-save", "slow_save", "run", expect("waiting<=likely"), "it had waited for a disk"),
    _still("waits-without-steps", "without_steps", "watch", _STARTING),
    _still("slow-import", "slow_import", "run", _STARTING),
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
