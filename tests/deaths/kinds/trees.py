"""Deaths in a family of processes: children, ranks, shells, and what they leave in the parent's name."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect
from tests.deaths.kinds.memory import KILLED

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
        Kind(f"exec-then-sigkill-{launch}", ("execs.py",), launch, acts.send(signal.SIGKILL), KILLED)
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
        expect("worker-killed distributed", notes_only="worker-killed distributed python-exception"),
        needs=("torch",),
    ),
)
