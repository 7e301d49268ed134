"""Deaths by memory, and deaths that only look like it."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect

_NO_TRACE = "SIGKILL leaves no note: without the recorder's evidence only the loss itself is known"

OOM = expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", at_least="certain", why=_NO_TRACE)

KILLED = expect(
    "killed",
    old_kernel="unknown killed<=likely",
    notes_only="recorder-lost",
    why=_NO_TRACE + "; without a status os._exit() looks the same",
)

_CHILD_OOM = expect(
    "worker-killed kernel-oom",
    notes_only="recorder-lost worker-killed<=likely kernel-oom<=likely",
    coarse="exit-code",
    why=_NO_TRACE,
)

_EITHER = expect(
    "killed",
    no_kernel_log="unknown killed<=likely kernel-oom<=likely",
    old_kernel="killed unknown",
    notes_only="recorder-lost",
    why="without the kernel log nobody can say which of the two the kernel killed",
)

_WORKER_OOM = expect(
    "worker-killed",
    notes_only="worker-killed python-exception",
    coarse="python-exception",
    why="torch's own words say only that a worker ended",
)

KINDS = (
    Kind("oom-slow-leak-run", ("leak.py", "2", "0.02"), "run", acts.cue, OOM, memory=96),
    Kind("oom-slow-leak-watch", ("leak.py", "2", "0.02"), "watch", acts.cue, OOM, memory=96),
    Kind("oom-burst-run", ("burst.py",), "run", acts.cue, OOM, memory=128),
    Kind("oom-burst-watch", ("burst.py",), "watch", acts.cue, OOM, memory=128),
    Kind("oom-numpy-pages-run", ("numpy_pages.py",), "run", acts.cue, OOM, memory=160, needs=("numpy",)),
    Kind(
        "oom-torch-tensors-watch", ("torch_tensors.py",), "watch", acts.cue, OOM, memory=400, needs=("torch",)
    ),
    Kind(
        "oom-torch-loop-run", ("torch_loop.py",), "run", acts.cue, OOM, steps=1, memory=400, needs=("torch",)
    ),
    Kind("oom-tf-tensors-run", ("tf_tensors.py",), "run", acts.cue, OOM, memory=800, needs=("tensorflow",)),
    Kind(
        "oom-limit-of-parent-group-run",
        ("leak.py", "4", "0.02"),
        "run",
        acts.cue,
        OOM,
        memory=96,
        needs=("nested-cgroup",),
    ),
    Kind(
        "oom-limit-of-parent-group-watch",
        ("leak.py", "4", "0.02"),
        "watch",
        acts.cue,
        OOM,
        memory=96,
        needs=("nested-cgroup",),
    ),
    Kind(
        "oom-after-moving-to-another-group-run",
        ("move_cgroup_then_leak.py", "{other}"),
        "run",
        acts.cue,
        expect(
            "kernel-oom",
            no_kernel_log="kernel-oom unknown killed<=likely",
            notes_only="recorder-lost kernel-oom<=likely",
            why="the counters that were being watched are those of the group it left",
        ),
        needs=("other-cgroup",),
    ),
    Kind(
        "oom-in-container-run",
        ("leak.py", "4", "0.02"),
        "run",
        acts.cue,
        expect(
            "kernel-oom",
            notes_only="recorder-lost machine-lost kernel-oom<=likely",
            at_least="likely",
            why="the kernel log names pids of another namespace; from outside a container is another machine",
        ),
        memory=96,
        needs=("pid-namespace",),
    ),
    Kind(
        "oom-as-first-process-of-container-watch",
        ("leak.py", "4", "0.02"),
        "watch",
        acts.cue,
        expect(
            "recorder-lost machine-lost kernel-oom<=likely",
            why="the first process of a container takes the recorder with it",
        ),
        memory=96,
        needs=("pid-namespace",),
    ),
    Kind(
        "oom-by-pressure-of-neighbour-run",
        ("hold.py", "80"),
        "run",
        acts.neighbour_presses,
        expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", why=_NO_TRACE),
        memory=128,
    ),
    Kind(
        "oom-by-pressure-of-neighbour-watch",
        ("hold.py", "80"),
        "watch",
        acts.neighbour_presses,
        expect("kernel-oom", notes_only="recorder-lost kernel-oom<=likely", why=_NO_TRACE),
        memory=128,
    ),
    *(
        Kind(name, command, "watch" if name.endswith("watch") else "run", act, _EITHER, memory=96)
        for name, command, act in (
            ("sigkill-as-neighbour-is-oom-killed-run", ("wait.py",), acts.neighbour_dies_too("0.002")),
            ("sigkill-as-neighbour-is-oom-killed-watch", ("wait.py",), acts.neighbour_dies_too("0.002")),
            (
                "sigkill-as-long-known-neighbour-is-oom-killed-run",
                ("wait.py",),
                acts.neighbour_dies_too("0.05"),
            ),
            (
                "sigkill-while-large-as-neighbour-is-oom-killed-run",
                ("hold.py", "60"),
                acts.neighbour_dies_too("0.002"),
            ),
            (
                "sigkill-while-large-as-neighbour-is-oom-killed-watch",
                ("hold.py", "60"),
                acts.neighbour_dies_too("0.002"),
            ),
        )
    ),
    *(
        Kind(
            f"survived-sigterm-and-exception-then-oom-{launch}",
            ("survives_then_leaks.py",),
            launch,
            acts.signal_then_cue(signal.SIGTERM, 0.5),
            expect(
                "kernel-oom",
                no_kernel_log="kernel-oom",
                notes_only="recorder-lost kernel-oom<=likely terminated<=likely python-exception<=likely",
                why="only old notes are left, and the kernel's part is not among them",
            ),
            memory=96,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigkill-while-large-after-child-was-oom-killed-{launch}",
            ("child_oom_then_wait.py", "60"),
            launch,
            acts.send(signal.SIGKILL),
            _EITHER,
            memory=128,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigkill-at-90-percent-{launch}",
            ("hold.py", "80"),
            launch,
            acts.send(signal.SIGKILL),
            KILLED,
            memory=112,
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "oom-under-bash-after-a-while-run",
        ("bash", "-c", "{python} {programs}/leak.py 1 0.03; exit $?"),
        "run",
        acts.cue,
        _CHILD_OOM,
        memory=96,
    ),
    Kind(
        "oom-under-bash-run",
        ("bash", "-c", "{python} {programs}/leak.py 4 0.02; exit $?"),
        "run",
        acts.cue,
        _CHILD_OOM,
        memory=96,
    ),
    *(
        Kind(
            f"oom-of-dataloader-worker-{launch}",
            ("dataloader_leak.py",),
            launch,
            acts.cue,
            _WORKER_OOM,
            memory=480,
            needs=("torch",),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"oom-of-child-main-ends-well-{launch}",
            ("child_oom_main_lives.py",),
            launch,
            acts.cue,
            expect("clean-exit"),
            memory=96,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"oom-of-child-then-server-hangs-up-{launch}",
            ("child_oom_then_reset.py",),
            launch,
            acts.cue,
            expect(
                "python-exception worker-killed<=likely",
                why="a connection that broke after a child died may have been the child's, or not",
            ),
            memory=96,
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"oom-of-child-then-bug-{launch}",
            ("child_oom_then_bug.py",),
            launch,
            acts.cue,
            expect("python-exception"),
            memory=96,
        )
        for launch in ("run", "watch")
    ),
)
