"""Deaths in which the recorder, the launcher or the whole machine went too."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect, with_starved

_LOST = expect(
    "recorder-lost", why="recorder and training were killed together: nothing was left to take a note"
)

_CUT_SHORT = "samples are missing"

_SAMPLES = (
    Kind(
        "oom-then-samples-lost-run",
        ("leak.py", "4", "0.1"),
        "run",
        acts.lose_samples(acts.cue, 0.0),
        expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", why="SIGKILL leaves no note"),
        says=_CUT_SHORT,
        memory=128,
    ),
    Kind(
        "oom-then-samples-cut-watch",
        ("leak.py", "4", "0.1"),
        "watch",
        acts.lose_samples(acts.cue, 0.4),
        expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", why="SIGKILL leaves no note"),
        says=_CUT_SHORT,
        memory=128,
    ),
    Kind(
        "sigkill-at-90-percent-then-samples-cut-run",
        ("hold.py", "80"),
        "run",
        acts.lose_samples(acts.send(signal.SIGKILL), 0.4),
        expect("killed", notes_only="recorder-lost", why="SIGKILL leaves no note"),
        says=_CUT_SHORT,
        memory=112,
    ),
)

KINDS = (
    *with_starved(*_SAMPLES),
    Kind(
        "recorder-killed-then-sigkill-run",
        ("wait.py",),
        "run",
        acts.kill_recorder_then(signal.SIGKILL),
        expect(
            "killed unknown recorder-lost",
            notes_only="recorder-lost",
            why="the counters were not read at its death",
        ),
    ),
    Kind(
        "recorder-killed-then-sigkill-watch",
        ("wait.py",),
        "watch",
        acts.kill_recorder_then(signal.SIGKILL),
        _LOST,
    ),
    *(
        Kind(
            f"recorder-killed-then-sigterm-{launch}",
            ("wait.py",),
            launch,
            acts.kill_recorder_then(signal.SIGTERM),
            expect("terminated"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"recorder-killed-then-exception-{launch}",
            ("exception.py",),
            launch,
            acts.kill_recorder_then_cue,
            expect("python-exception"),
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "recorder-killed-and-restarted-then-oom-run",
        ("leak.py", "2", "0.02"),
        "run",
        acts.kill_recorder_then_wait_then_cue,
        expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", why="SIGKILL leaves no note"),
        memory=96,
    ),
    Kind("container-killed-whole-run", ("wait.py",), "run", acts.kill_everything, _LOST),
    Kind(
        "container-killed-whole-in-group-watch",
        ("hold.py", "60"),
        "watch",
        acts.kill_everything,
        _LOST,
        memory=96,
    ),
    Kind(
        "launcher-killed-then-sigkill-run",
        ("wait.py",),
        "run",
        acts.kill_launcher_then_main,
        expect(
            "killed",
            old_kernel="unknown killed",
            notes_only="recorder-lost",
            why="nobody is left who waits for it",
        ),
    ),
    Kind(
        "alive-in-container-seen-from-outside-run",
        ("wait.py",),
        "run",
        acts.judge_from_outside_then_kill,
        expect(
            "killed",
            notes_only="recorder-lost machine-lost",
            why="seen from outside, an ended container is another machine",
        ),
        alive=expect("still-running unknown recorder-lost<=likely machine-lost<=likely"),
        needs=("pid-namespace",),
    ),
    Kind("simulated-machine-lost-run", ("wait.py",), "run", acts.lose_the_machine, expect("machine-lost")),
    Kind(
        "simulated-machine-lost-watch", ("wait.py",), "watch", acts.lose_the_machine, expect("machine-lost")
    ),
)
