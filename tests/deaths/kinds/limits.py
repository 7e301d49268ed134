"""Deaths at a limit of time or size that the kernel or the session enforces."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect
from tests.deaths.kinds.memory import KILLED

KINDS = (
    *(
        Kind(
            f"cpu-limit-soft-{launch}",
            ("burn_cpu.py", "2", "3"),
            launch,
            acts.cue,
            expect(
                "cpu-limit",
                notes_only="cpu-limit other-signal",
                coarse="other-signal",
                why="the note says SIGXCPU, not what the limit was",
            ),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"cpu-limit-of-the-shell-{name}-run",
            ("sh", "-c", f"ulimit -St 2; exec {{python}} {{programs}}/burn_cpu.py {how}"),
            "run",
            acts.cue,
            expect(
                "cpu-limit",
                notes_only="cpu-limit other-signal",
                at_least="likely",
                coarse="other-signal",
                why="the note says SIGXCPU, not what the limit was",
            ),
        )
        for name, how in (("one-thread", "1"), ("four-threads", "4"))
    ),
    *(
        Kind(
            f"cpu-limit-set-late-{launch}",
            ("burn_cpu.py", "1", "2", "late"),
            launch,
            acts.cue,
            expect("cpu-limit other-signal", why="nobody may have read the limit before it was reached"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"cpu-limit-hard-{launch}",
            ("burn_cpu.py", "1", "2", "ignore"),
            launch,
            acts.cue,
            expect(
                "cpu-limit",
                old_kernel="cpu-limit unknown",
                notes_only="recorder-lost cpu-limit<=likely",
                why="SIGKILL leaves no note",
            ),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigxfsz-{launch}",
            ("file_size.py", "SIGXFSZ"),
            launch,
            acts.cue,
            expect(
                "file-size-limit",
                old_kernel="unknown file-size-limit",
                notes_only="recorder-lost",
                why="the signal leaves no note",
            ),
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "wall-time-limit-run",
        ("wait.py",),
        "run",
        acts.kill_at_time_limit(2.0),
        expect(
            "time-limit<=likely",
            notes_only="time-limit<=likely recorder-lost",
            why="nothing proves that the clock was the reason",
        ),
        options=("--time-limit", "2s"),
    ),
    Kind(
        "sigkill-long-before-time-limit-run",
        ("wait.py",),
        "run",
        acts.send(signal.SIGKILL),
        KILLED,
        options=("--time-limit", "60s"),
    ),
    Kind(
        "sigkill-near-cpu-limit-run",
        ("burn_cpu.py", "3", "3"),
        "run",
        acts.cue_then_send(signal.SIGKILL, 2.2),
        expect(
            "killed cpu-limit<=likely",
            notes_only="recorder-lost",
            why="SIGKILL leaves no note; near the limit both are thinkable",
        ),
    ),
    Kind(
        "oom-at-time-limit-run",
        ("leak.py", "2", "0.03"),
        "run",
        acts.cue,
        expect(
            "kernel-oom",
            notes_only="recorder-lost kernel-oom<=likely time-limit<=likely",
            why="SIGKILL leaves no note",
        ),
        memory=96,
        options=("--time-limit", "1s"),
    ),
)
