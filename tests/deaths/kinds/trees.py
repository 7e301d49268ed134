"""Deaths in a family of processes: children, ranks, shells, and what they leave in the parent's name."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect
from tests.deaths.kinds.memory import KILLED

_PASSED_ON = "a shell leaves no note, and what its command left need not be the end of it"

KINDS = (
    *(
        Kind(
            f"spawned-child-crashes-{launch}",
            ("spawned_child_crashes.py",),
            launch,
            acts.cue,
            expect("python-exception worker-killed"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"forked-child-raised-then-sigkill-{launch}",
            ("forked_child_raises.py",),
            launch,
            acts.send(signal.SIGKILL),
            KILLED,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"forked-child-crashed-then-sigkill-{launch}",
            ("forked_child_segfaults.py",),
            launch,
            acts.send(signal.SIGKILL),
            KILLED,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"exception-caught-then-sigkill-{launch}",
            ("exception_caught.py",),
            launch,
            acts.send(signal.SIGKILL),
            expect(
                "killed",
                old_kernel="unknown killed<=likely python-exception<=likely",
                notes_only="recorder-lost python-exception<=likely",
                why="without a status the old note could be the last word",
            ),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"exec-then-sigkill-{launch}", ("execs.py", "wait.py"), launch, acts.send(signal.SIGKILL), KILLED
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"exec-then-exception-{launch}",
            ("execs.py", "exception.py"),
            launch,
            acts.cue,
            expect("python-exception", coarse="exit-code"),
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "sigkill-in-slow-shutdown-watch",
        ("slow_shutdown.py",),
        "watch",
        acts.send(signal.SIGKILL),
        expect(
            "killed",
            old_kernel="unknown killed<=likely clean-exit<=likely",
            notes_only="recorder-lost clean-exit<=likely",
            why="the interpreter had already said that it was shutting down in order",
        ),
    ),
    Kind(
        "exception-under-bash-run",
        ("bash", "-c", "{python} {programs}/exception.py; exit $?"),
        "run",
        acts.cue,
        expect(
            "python-exception", old_kernel="python-exception exit-code", coarse="exit-code", why=_PASSED_ON
        ),
    ),
    Kind(
        "exception-in-second-command-of-bash-run",
        ("bash", "-c", "{python} -c pass; {python} {programs}/exception.py; exit $?"),
        "run",
        acts.cue,
        expect(
            "python-exception",
            old_kernel="python-exception exit-code",
            notes_only="python-exception recorder-lost",
            coarse="exit-code",
            why=_PASSED_ON,
        ),
    ),
    Kind(
        "exception-under-bash-then-other-code-run",
        ("bash", "-c", "{python} {programs}/exception.py; exit 3"),
        "run",
        acts.cue,
        expect("exit-code", notes_only="recorder-lost python-exception<=likely", why=_PASSED_ON),
    ),
    Kind(
        "exception-under-bash-forgiven-run",
        ("bash", "-c", "{python} {programs}/exception.py || true"),
        "run",
        acts.cue,
        expect("clean-exit", notes_only="recorder-lost python-exception<=likely", why=_PASSED_ON),
    ),
    Kind(
        "segfault-under-bash-run",
        ("bash", "-c", "{python} {programs}/segfault.py; exit $?"),
        "run",
        acts.cue,
        expect(
            "native-crash worker-killed",
            notes_only="native-crash recorder-lost",
            coarse="exit-code",
            why=_PASSED_ON,
        ),
    ),
    Kind(
        "sigkill-under-bash-run",
        ("bash", "-c", "{python} {programs}/wait.py; exit $?"),
        "run",
        acts.send(signal.SIGKILL),
        expect("worker-killed killed", notes_only="recorder-lost", coarse="exit-code", why=_PASSED_ON),
    ),
    Kind(
        "timeout-command-run",
        ("timeout", "2", "{python}", "{programs}/wait.py"),
        "run",
        acts.wait_only,
        expect("exit-code terminated worker-killed time-limit<=likely"),
    ),
    Kind(
        "two-gloo-ranks-one-killed-run",
        ("gloo_ranks.py",),
        "run",
        acts.kill_rank,
        expect(
            "worker-killed distributed",
            old_kernel="worker-killed distributed python-exception",
            notes_only="worker-killed distributed python-exception",
            why="only torch's words tell of the rank's end",
        ),
        needs=("torch",),
    ),
)
