"""Programs that end by their own decision."""

from __future__ import annotations

from tests.deaths import acts
from tests.deaths.kind import Expected, Kind, expect, with_starved

_CLEAN = expect("clean-exit")
_ORDERLY = expect(
    "exit-code",
    old_kernel="exit-code unknown clean-exit<=possible",
    notes_only="exit-code recorder-lost unknown clean-exit<=possible",
    why="the note says that the interpreter shut down cleanly, not with which code",
)
_SUDDEN = expect(
    "exit-code",
    old_kernel="unknown",
    notes_only="recorder-lost",
    why="os._exit() runs nothing: without the status it looks like SIGKILL",
)
_NO_PYTHON = "not a Python program: it leaves no note"


def _both(name: str, command: tuple[str, ...], expected: Expected) -> tuple[Kind, Kind]:
    return (
        Kind(f"{name}-run", command, "run", acts.cue, expected),
        Kind(f"{name}-watch", command, "watch", acts.cue, expected),
    )


KINDS = (
    *_both("clean-exit", ("exits.py", "end", "0"), _CLEAN),
    *_both("clean-exit-after-handled-memory-error", ("memory_error_handled.py",), _CLEAN),
    *_both("clean-exit-after-exception-in-thread", ("exception_in_thread_exit0.py",), _CLEAN),
    Kind("clean-exit-dataloader-run", ("dataloader_fine.py",), "run", acts.cue, _CLEAN, needs=("torch",)),
    *_both("clean-exit-leaving-a-child", ("fork_and_exit.py",), _CLEAN),
    *_both("clean-exit-after-forked-child-crashed", ("forked_child_segfaults.py",), _CLEAN),
    *_both(
        "os-exit-0",
        ("exits.py", "os._exit", "0"),
        expect(
            "clean-exit", old_kernel="unknown", notes_only="recorder-lost", why="os._exit() leaves no note"
        ),
    ),
    *with_starved(*_both("sys-exit-3", ("exits.py", "sys.exit", "3"), _ORDERLY)),
    *_both("sys-exit-message", ("exits.py", "message", "no GPU found, giving up"), _ORDERLY),
    *_both("sys-exit-143", ("exits.py", "sys.exit", "143"), _ORDERLY),
    *_both(
        "sys-exit-3-after-shown-exception",
        ("exception_shown_then_exit.py", "3"),
        expect(
            "exit-code python-exception<=likely",
            old_kernel="exit-code unknown python-exception<=likely",
            notes_only="exit-code recorder-lost python-exception<=likely",
            why="an exception nobody caught gives code 1; without the code the note could be the last word",
        ),
    ),
    *_both(
        "sys-exit-1-after-shown-exception",
        ("exception_shown_then_exit.py", "1"),
        expect(
            "exit-code python-exception<=likely",
            old_kernel="exit-code unknown python-exception<=likely",
            notes_only="exit-code recorder-lost python-exception<=likely",
            why="the exception was caught and shown; that it ended the program is likely at most",
        ),
    ),
    *_both("os-exit-7", ("exits.py", "os._exit", "7"), _SUDDEN),
    *_both("os-exit-137", ("exits.py", "os._exit", "137"), _SUDDEN),
    Kind("os-exit-at-once-run", ("exits_at_once.py", "5"), "run", acts.nothing, _SUDDEN),
    Kind(
        "shell-exit-4-run",
        ("sh", "-c", "exit 4"),
        "run",
        acts.nothing,
        expect("exit-code", notes_only="recorder-lost", why=_NO_PYTHON),
    ),
    Kind(
        "shell-exit-137-run",
        ("bash", "-c", "sleep 0.3; exit 137"),
        "run",
        acts.nothing,
        expect("exit-code", notes_only="recorder-lost", why=_NO_PYTHON),
    ),
    Kind(
        "sleep-ends-run",
        ("sleep", "0.3"),
        "run",
        acts.nothing,
        expect("clean-exit", notes_only="recorder-lost", why=_NO_PYTHON),
    ),
    Kind(
        "isolated-python-exception-run",
        ("{python}", "-I", "{programs}/isolated.py", "{stage}"),
        "run",
        acts.cue,
        expect(
            "exit-code",
            notes_only="recorder-lost",
            why="`python -I` cannot be instrumented: it leaves no note",
        ),
    ),
)
