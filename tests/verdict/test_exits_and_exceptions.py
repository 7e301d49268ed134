"""Deaths by the program's own decision or by an exception. Messages are those that real programs left."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import GIB, PID, Attempt, exited, note

RUNTIME = ("builtins.RuntimeError",)
OS = ("builtins.OSError",)
ARRAY_ERROR = "numpy._core._exceptions._ArrayMemoryError"
TF = "tensorflow.python.framework.errors_impl.ResourceExhaustedError"


def said(attempt: Attempt) -> tuple[str, str]:
    verdict = attempt.verdict()
    return verdict.cause.id, verdict.cause.claim.grade


SHM = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n ... "
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_5383_0>: No space left on device (28)\n"
)
TORCH_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
TF_CPU = (
    "{{function_node __wrapped__Fill}} OOM when allocating tensor with shape[1024,1024,1024] and type float "
    "on /job:localhost/replica:0/task:0/device:CPU:0 by allocator mklcpu [Op:Fill] name: "
)
TF_DISK = (
    "{{function_node __wrapped__SaveV2_device_/job:localhost/replica:0/task:0/device:CPU:0}} "
    "t/ck-1_temp/part-00000-of-00001.data; No space left on device [Op:SaveV2]"
)
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8068: "
    "Connection reset by peer. This is typically caused by a remote worker hanging"
)
NUMPY = "Unable to allocate 745. GiB for an array with shape (100000, 1000, 1000) and data type float64"
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.75 GiB"
KERNEL = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    ("kind", "message", "bases", "errno", "cause", "grade"),
    [
        ("builtins.KeyError", "'label'", (), None, "python-exception", "certain"),
        ("builtins.ModuleNotFoundError", "No module named 'sklearn'", (), None, "python-exception", "certain"),
        ("builtins.MemoryError", "", (), None, "memory-error", "certain"),
        (ARRAY_ERROR, NUMPY, ("builtins.MemoryError",), None, "memory-error", "certain"),
        ("builtins.RuntimeError", TORCH_CPU, RUNTIME, None, "memory-error", "certain"),
        (TF, TF_CPU, (), None, "memory-error", "certain"),
        (TF, TF_CPU.replace("CPU:0", "GPU:0"), (), None, "gpu-oom", "certain"),
        (TF, TF_DISK, (), None, "disk-full", "certain"),
        ("torch.OutOfMemoryError", CUDA, RUNTIME, None, "gpu-oom", "certain"),
        ("builtins.RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", RUNTIME, None, "gpu-oom", "likely"),
        ("torch.AcceleratorError", KERNEL, RUNTIME, None, "gpu-fault", "certain"),
        ("builtins.RuntimeError", SHM, RUNTIME, None, "shm-full", "certain"),
        ("builtins.OSError", "[Errno 28] No space left on device", OS, 28, "disk-full", "certain"),
        ("builtins.OSError", "[Errno 122] Disk quota exceeded", OS, 122, "disk-full", "certain"),
        ("builtins.OSError", "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 28] No space", OS, None,
         "disk-full", "certain"),
        ("builtins.OSError", "[Errno 27] File too large", OS, 27, "file-size-limit", "certain"),
        ("builtins.OSError", "[Errno 24] Too many open files: 'x'", OS, 24, "open-files", "certain"),
        ("builtins.RuntimeError", "received 0 items of ancdata", RUNTIME, None, "open-files", "certain"),
        ("builtins.RuntimeError", "can't start new thread", RUNTIME, None, "process-limit", "certain"),
        ("builtins.BlockingIOError", "[Errno 11] Resource temporarily unavailable", OS, 11,
         "python-exception", "certain"),
        ("builtins.RuntimeError", GLOO, RUNTIME, None, "distributed", "likely"),
        ("torch.distributed.DistBackendError", "NCCL error in: x", RUNTIME, None, "distributed", "likely"),
        ("builtins.KeyboardInterrupt", "", (), None, "interrupted", "certain"),
        ("builtins.ValueError", "'Killed: No space left on device'", (), None, "python-exception", "certain"),
        ("builtins.ValueError", CUDA, (), None, "python-exception", "certain"),
    ],
)  # fmt: skip
def test_uncaught_exceptions(
    attempt: Attempt,
    kind: str,
    message: str,
    bases: tuple[str, ...],
    errno: int | None,
    cause: str,
    grade: str,
) -> None:
    attempt.raises(kind, message, bases, errno=errno, disk_free=0)
    verdict = attempt.verdict()

    assert said(attempt) == (cause, grade)
    assert verdict.where.line == 31
    assert any(reading.source == f"process-{PID}/beacon" for reading in verdict.cause.claim.evidence)


def test_a_refused_fork_is_a_process_limit_and_a_socket_that_does_not_wait_is_not(attempt: Attempt) -> None:
    words = "[Errno 11] Resource temporarily unavailable"
    attempt.raises("builtins.BlockingIOError", words, OS, errno=11, starting_process=True)

    assert said(attempt) == ("process-limit", "likely")


def test_an_exception_that_was_only_shown_is_not_certain(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'x'", (), uncaught=False)

    assert said(attempt) == ("python-exception", "likely")


@pytest.mark.parametrize(
    ("message", "asked"), [(NUMPY, 799_937_658_880), (TORCH_CPU, 8 * GIB), (TF_CPU, 4 * GIB), (CUDA, 2 * GIB)]
)
def test_the_allocation_asked_for_is_shown(attempt: Attempt, message: str, asked: int) -> None:
    attempt.raises("builtins.MemoryError", message)

    assert attempt.verdict().holders[0].bytes == asked


def test_a_cause_deep_in_the_chain_is_likely(attempt: Attempt) -> None:
    chain = [{"type": "builtins.OSError", "message": "[Errno 28] No space left on device", "errno": 28}]
    attempt.raises("builtins.RuntimeError", "could not save the checkpoint", RUNTIME, chain=chain)

    assert said(attempt) == ("disk-full", "likely")


def test_torch_saves_word_for_a_full_disk_needs_a_full_disk(attempt: Attempt) -> None:
    words = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
    attempt.raises("builtins.RuntimeError", words, RUNTIME, disk_free=0)
    assert said(attempt) == ("disk-full", "likely")

    attempt.raises("builtins.RuntimeError", words, RUNTIME, disk_free=50 * GIB)
    assert said(attempt) == ("python-exception", "certain")


def test_shared_memory_with_room_is_too_small_and_not_full(attempt: Attempt) -> None:
    attempt.death["disks"]["shm"] = {"path": "/dev/shm", "free": 3 << 20, "total": 3 << 20}
    for row in attempt.samples:
        row["shm_free"] = 3 << 20
    attempt.raises("builtins.RuntimeError", SHM, RUNTIME)
    assert said(attempt) == ("shm-full", "certain")
    assert "(3.0 MiB) is too small for what was requested" in attempt.verdict().cause.claim.text

    attempt.samples[-2]["shm_free"] = 4096
    assert "(3.0 MiB) is full" in attempt.verdict().cause.claim.text


def test_a_memory_error_of_a_worker_is_not_that_of_the_line_that_waits(attempt: Attempt) -> None:
    words = "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback ..."
    attempt.raises("builtins.MemoryError", words)

    assert said(attempt) == ("memory-error", "certain")
    assert "num_workers=0" in attempt.verdict().cause.next[0]
    assert "that line" not in " ".join(attempt.verdict().cause.next)


def test_a_limit_on_memory_is_only_lifted_where_one_was_set(attempt: Attempt) -> None:
    attempt.raises("builtins.MemoryError", memory_limit=None)
    free = attempt.verdict().cause
    attempt.raises("builtins.MemoryError", memory_limit=4 * GIB)
    limited = attempt.verdict().cause

    assert "ulimit" not in " ".join(free.next)
    assert "1.0 GiB were available" in free.actor.text
    assert "ulimit -v unlimited" in limited.next[0]
    assert "4.0 GiB" in limited.actor.text


def test_a_run_that_left_with_a_code_is_told_its_checkpoint(attempt: Attempt) -> None:
    attempt.event("save", 5.0, what="torch", path="/home/me/ck/step-100.pt", step=100)
    attempt.death["status"]["raw"] = exited(137)

    assert said(attempt) == ("exit-code", "certain")
    assert "resume from step 100" in attempt.verdict().cause.next[-1]


TORCH_WRITES = (
    "[enforce fail at inline_container.cc:672] . unexpected pos 896 vs 790",
    "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/3: file write failed",
)


@pytest.mark.parametrize("words", TORCH_WRITES)
def test_torch_save_on_a_disk_of_the_run_that_was_full_is_a_full_disk(attempt: Attempt, words: str) -> None:
    """The working directory has room; three readings tell of the disk that is full, each enough by itself."""
    run = str(attempt.folder.parent.parent)
    attempt.raises("builtins.RuntimeError", words, RUNTIME)
    assert said(attempt) == ("python-exception", "certain")
    assert "df -h" in attempt.verdict().cause.next[0]

    attempt.event("warning", 0.2, alarm="disk-full", text="disk: it is full", values={"path": run})
    assert said(attempt) == ("disk-full", "likely")
    attempt.events[-1]["t"] -= 300
    assert said(attempt) == ("python-exception", "certain")

    for row in attempt.samples:
        row["disk_free"] = 4096
    assert said(attempt) == ("disk-full", "likely")
    for row in attempt.samples:
        row["disk_free"] = 50 * GIB

    attempt.raises("builtins.RuntimeError", words, RUNTIME, run_disk_free=0)
    verdict = attempt.verdict()
    assert (verdict.cause.id, verdict.cause.claim.grade) == ("disk-full", "likely")
    assert "the disk that holds " in verdict.cause.claim.text
    assert "/home/me" not in verdict.cause.next[0]


def test_the_disk_that_is_full_is_named_and_not_the_working_directorys(
    attempt: Attempt, make_disk: Callable[[str], Path]
) -> None:
    small = str(make_disk("64k"))
    attempt.event("disk", 60, path=f"{small}/runs/cats")
    os.makedirs(f"{small}/runs/cats")
    for row in attempt.samples:
        row["disk_free"] = 0
    attempt.raises("builtins.OSError", "[Errno 28] No space left on device", OS, errno=28)
    verdict = attempt.verdict()

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("disk-full", "likely")
    assert small in verdict.cause.claim.text
    assert f"`du -xh {small} |" in verdict.cause.next[0]
    assert f"`df -h {small}`" in verdict.cause.next[0]


def test_no_space_on_a_disk_with_room_is_likely_at_most(attempt: Attempt) -> None:
    """Inotify watches that run out give the same error; inodes that did are as good as a full disk."""
    words = "[Errno 28] No space left on device"
    attempt.raises("builtins.OSError", words, OS, errno=28, disk_free=50 * GIB, inodes_free=1000)
    assert said(attempt) == ("disk-full", "likely")
    assert "df -i" in attempt.verdict().cause.next[1]

    attempt.raises("builtins.OSError", words, OS, errno=28, disk_free=50 * GIB, inodes_free=0)
    assert said(attempt) == ("disk-full", "certain")


def test_a_full_file_in_shared_memory_is_told_from_a_full_disk(attempt: Attempt) -> None:
    attempt.raises(
        "builtins.OSError",
        "[Errno 28] No space left on device",
        OS,
        errno=28,
        filename="/dev/shm/batch",
        disk_free=0,
    )

    assert said(attempt) == ("shm-full", "certain")


FULL = ("builtins.OSError", "[Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("room", "cause"),
    [
        ({"shm_free": 0}, ("shm-full", "likely")),
        (
            {"shm_free": 0, "chain": [{"type": FULL[0], "message": FULL[1], "errno": 28}]},
            ("shm-full", "likely"),
        ),
        ({"shm_free": 0, "disk_free": 0, "on_shm": True}, ("shm-full", "certain")),
        ({"shm_free": 0, "disk_free": 0}, ("disk-full", "certain")),
        ({"shm_free": 0, "filename": "/data/x.bin"}, ("disk-full", "likely")),
        ({"shm_free": 0, "inodes_free": 0}, ("disk-full", "certain")),
        ({"shm_free": 1 << 30}, ("disk-full", "likely")),
    ],
)
def test_a_write_that_names_no_file_is_told_apart_by_what_is_full(
    attempt: Attempt, room: dict[str, Any], cause: tuple[str, str]
) -> None:
    kind, message = ("builtins.RuntimeError", "could not save") if "chain" in room else FULL
    attempt.raises(
        kind, message, ("builtins.OSError",)[: kind == FULL[0]], errno=28 if kind == FULL[0] else None, **room
    )

    assert said(attempt) == cause
    assert ("ls -lhS /dev/shm" in " ".join(attempt.verdict().cause.next)) is (cause[0] == "shm-full")


def test_disk_full_says_which_file_and_how_much_is_free(attempt: Attempt) -> None:
    attempt.raises(
        "builtins.OSError", "[Errno 28] No space", OS, errno=28, filename="/data/ck/last.pt", disk_free=4096
    )
    verdict = attempt.verdict()

    assert "/data/ck/last.pt" in verdict.cause.claim.text
    assert any("4.0 KiB free" in reading.text for reading in verdict.cause.claim.evidence)
    assert "/data/ck" in verdict.cause.next[0]


def test_an_exception_without_a_status_is_likely(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'x'")
    attempt.death["status"] = {"raw": None, "source": None}

    assert said(attempt) == ("python-exception", "likely")


def test_an_exception_of_another_thread_is_not_certain_to_be_the_end(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'x'", thread="Thread-3")

    assert said(attempt) == ("python-exception", "likely")


def test_an_exception_that_was_reported_and_survived_is_no_death(attempt: Attempt) -> None:
    attempt.raises("builtins.MemoryError")
    attempt.death["status"]["raw"] = exited(0)

    assert said(attempt) == ("clean-exit", "certain")


def test_clean_exit(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"})
    attempt.death["status"]["raw"] = 0
    attempt.death["alive"] = [55]

    assert said(attempt) == ("clean-exit", "certain")
    assert "55" in attempt.verdict().cause.cascade[0].evidence[0].text


@pytest.mark.parametrize(
    ("cell", "said_last", "cause"),
    [
        ("In [3] train()", None, "exit-code"),
        ("", None, "clean-exit"),
        ("In [3] exit()", {"kind": "exit"}, "clean-exit"),
    ],
)
def test_code_0_in_the_middle_of_a_cell_is_no_good_end(
    attempt: Attempt, cell: str, said_last: dict[str, str] | None, cause: str
) -> None:
    assert attempt.death is not None
    attempt.attempt.update(
        mode="watch", command=["python", "/lib/ipykernel_launcher.py", "-f", "kernel.json"]
    )
    attempt.death["status"]["raw"] = exited(0)
    attempt.event("training", 60.0, run=".", step=0)
    attempt.event("save", 10.0, what="buoy", path="runs/train/checkpoints/step-000000100", step=100)
    attempt.process(PID, said_last)
    with (attempt.folder / f"process-{PID}" / "beacon").open("r+b") as file:
        file.seek(512)
        file.write(struct.pack("<I", len(cell)) + cell.encode())
    verdict = attempt.verdict()

    assert (verdict.cause.id, verdict.cause.claim.grade) == (cause, "certain")
    if cause == "exit-code":
        assert "in the middle of a cell" in verdict.cause.claim.text
        assert verdict.cause.next[0].startswith("resume from step 100")


@pytest.mark.parametrize(("finished", "grade"), [(True, "likely"), (False, "possible"), (None, "possible")])
def test_an_orderly_exit_with_unknown_code_is_a_good_one_if_the_script_came_to_its_end(
    attempt: Attempt, finished: bool | None, grade: str
) -> None:
    attempt.process(PID, {"kind": "exit", "finished": finished})
    attempt.death["status"] = {"raw": None, "source": None}

    assert said(attempt) == ("clean-exit", grade)
    assert ("may have failed" in attempt.verdict().cause.claim.text) is (grade == "possible")


@pytest.mark.parametrize("code", [1, 3, 7, 255])
def test_an_exit_code_is_the_programs_own_choice(attempt: Attempt, code: int) -> None:
    attempt.death["status"]["raw"] = exited(code)

    assert said(attempt) == ("exit-code", "certain")
    assert f"exit code {code}" in attempt.verdict().cause.claim.text


def test_exit_code_137_of_a_watched_python_is_no_kill(attempt: Attempt) -> None:
    attempt.death["status"]["raw"] = exited(137)

    assert said(attempt) == ("exit-code", "certain")
    assert "no signal killed it" in attempt.verdict().cause.claim.text


def test_no_status_and_no_last_words_cannot_be_told(attempt: Attempt) -> None:
    attempt.death["status"] = {"raw": None, "source": None}

    assert said(attempt) == ("unknown", "possible")
    assert "it was not the kernel" in attempt.verdict().cause.claim.text


def test_the_note_is_used_when_the_recorder_is_lost(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'x'")
    attempt.death = None

    assert said(attempt) == ("python-exception", "likely")


def test_chain_of_unknown_shape_is_ignored(attempt: Attempt) -> None:
    attempt.process(
        PID, {**note("builtins.RuntimeError", "x", RUNTIME), "chain": [1, None, {"type": 5}], "bases": "no"}
    )
    attempt.death["status"]["raw"] = exited(1)

    assert said(attempt) == ("python-exception", "certain")


@pytest.mark.parametrize("cause", [("gpu-oom", CUDA), ("gpu-fault", KERNEL)])
def test_words_about_a_gpu_are_certain_only_where_one_was_seen(
    attempt: Attempt, cause: tuple[str, str]
) -> None:
    """Anybody can raise a RuntimeError with CUDA's words on a machine without a GPU."""
    attempt.raises("builtins.RuntimeError", cause[1], RUNTIME)
    assert said(attempt) == (cause[0], "likely")

    attempt.death["gpu"] = [{"index": 0, "name": "T4", "used": 14 * GIB, "total": 15 * GIB, "util": 90}]
    assert said(attempt) == (cause[0], "certain")


def test_a_missing_file_mentions_colabs_folder_on_colab_only(attempt: Attempt) -> None:
    attempt.raises("builtins.FileNotFoundError", "[Errno 2] No such file: 'x'", OS, errno=2)
    assert "/content" not in attempt.verdict().cause.next[0]

    attempt.attempt["platform"] = "colab-t4"
    assert "/content" in attempt.verdict().cause.next[0]


@pytest.mark.parametrize(("limit", "first"), [(6 << 30, "`ulimit -v`"), (None, "`ulimit -u`")])
def test_a_thread_that_was_refused_names_the_limit_that_was_recorded(
    attempt: Attempt, limit: int | None, first: str
) -> None:
    attempt.raises("builtins.RuntimeError", "can't start new thread", RUNTIME, memory_limit=limit)
    cause = attempt.verdict().cause

    assert cause.id == "process-limit" and cause.next[0].startswith(first)
    assert cause.actor is not None and ("6.0 GiB" in cause.actor.text) == (limit is not None)
    assert "cat /sys/fs/cgroup/pids.max" not in str(cause)  # not there in version 1, nor in a root group


def test_a_pipe_whose_reader_had_gone_is_no_line_to_mend(attempt: Attempt) -> None:
    attempt.raises("builtins.BrokenPipeError", "[Errno 32] Broken pipe", ("builtins.OSError",), errno=32)
    cause = attempt.verdict().cause

    assert cause.id == "python-exception" and "the reader of its output was gone" in cause.next[0]
