"""Deaths by a Python exception that nobody caught."""

from __future__ import annotations

from tests.deaths import acts
from tests.deaths.kind import Expected, Kind, expect, with_starved


def _said(*causes: str) -> Expected:
    """An exception leaves a note: it can be told, and told for certain, in every mode."""
    return expect(" ".join(causes), at_least="certain")


def _both(name: str, command: tuple[str, ...], expected: Expected, **more) -> tuple[Kind, Kind]:
    return (
        Kind(f"{name}-run", command, "run", acts.cue, expected, **more),
        Kind(f"{name}-watch", command, "watch", acts.cue, expected, **more),
    )


_PLAIN = _said("python-exception")

KINDS = (
    *_both("exception", ("exception.py",), _PLAIN),
    Kind("exception-huge-message-run", ("odd_exception.py", "huge"), "run", acts.cue, _PLAIN),
    Kind("exception-unprintable-watch", ("odd_exception.py", "unprintable"), "watch", acts.cue, _PLAIN),
    Kind("exception-group-run", ("exception_group.py",), "run", acts.cue, _PLAIN),
    *_both("exception-misleading-message", ("misleading_message.py",), _PLAIN),
    *_both(
        "exception-own-excepthook",
        ("own_excepthook.py",),
        expect("python-exception"),
    ),
    *_both("exception-with-pool-workers", ("pool_then_bug.py",), _PLAIN),
    Kind(
        "exception-with-dataloader-workers-run",
        ("dataloader_then_bug.py",),
        "run",
        acts.cue,
        _PLAIN,
        needs=("torch",),
    ),
    *_both("exception-after-killing-own-subprocess", ("subprocess_timeout.py",), _PLAIN),
    *_both("exception-eagain-of-socket", ("nonblocking_recv.py",), _PLAIN),
    *_both("recursion-error", ("recursion.py",), _PLAIN),
    *_both("import-error-after-training", ("late_import.py",), _said("python-exception", "bad-import")),
    *_both("memory-error", ("memory_error.py",), _said("memory-error")),
    Kind(
        "memory-error-numpy-run",
        ("numpy_memory_error.py",),
        "run",
        acts.cue,
        _said("memory-error"),
        needs=("numpy",),
    ),
    Kind(
        "memory-error-torch-cpu-run",
        ("torch_memory_error.py",),
        "run",
        acts.cue,
        _said("memory-error"),
        needs=("torch",),
    ),
    Kind(
        "memory-error-tensorflow-cpu-run",
        ("tf_exhausted.py",),
        "run",
        acts.cue,
        _said("gpu-oom", "memory-error"),
        needs=("tensorflow",),
    ),
    Kind(
        "simulated-gpu-oom-run",
        ("simulated_gpu_oom.py",),
        "run",
        acts.cue,
        _said("gpu-oom"),
        needs=("torch",),
    ),
    *_both("simulated-gpu-fault", ("simulated_gpu_fault.py",), expect("gpu-fault")),
    *_both("disk-full", ("fill_disk.py", "{disk}"), expect("disk-full", at_least="likely"), needs=("disk",)),
    *_both("disk-full-wrapped", ("fill_disk_wrapped.py", "{disk}"), expect("disk-full"), needs=("disk",)),
    *_both(
        "disk-full-under-run-folder",
        ("fill_disk.py", "{disk}"),
        expect("disk-full"),
        needs=("disk",),
        run_folder="{disk}/run",
    ),
    *_both(
        "raised-enospc-with-room",
        ("raised_enospc_with_room.py",),
        expect(
            "python-exception disk-full<=likely",
            why="inotify watches and semaphores that run out give the same error on an empty disk",
        ),
    ),
    Kind(
        "disk-without-inodes-run",
        ("fill_inodes.py", "{disk}"),
        "run",
        acts.cue,
        expect("disk-full"),
        needs=("disk",),
    ),
    *_both("raised-edquot", ("raised_edquot.py",), _said("disk-full")),
    Kind(
        "shm-full-dataloader-run",
        ("dataloader_shm.py",),
        "run",
        acts.cue,
        expect("shm-full", notes_only="shm-full worker-killed<=likely bus-error python-exception"),
        needs=("torch", "small-shm"),
    ),
    *with_starved(
        *_both(
            "shm-full-by-a-plain-write",
            ("fill_disk.py", "/dev/shm"),
            expect("shm-full"),
            needs=("small-shm",),
        ),
    ),
    *_both(
        "shm-full-wrapped", ("fill_disk_wrapped.py", "/dev/shm"), expect("shm-full"), needs=("small-shm",)
    ),
    *_both("file-size-limit", ("file_size.py",), _said("file-size-limit")),
    *_both("open-files-limit", ("many_files.py",), _said("open-files")),
    *(
        Kind(
            f"{name}-{launch}",
            (program,),
            launch,
            acts.limit_processes,
            expect("process-limit", coarse="python-exception"),
            needs=("pids-cgroup",),
        )
        for name, program in (("thread-limit", "many_threads.py"), ("fork-limit", "many_forks.py"))
        for launch in ("run", "watch")
    ),
)
