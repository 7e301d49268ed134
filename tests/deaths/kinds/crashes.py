"""Deaths in native code, and signals sent by hand that look like them."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Expected, Kind, expect

_CRASH = expect("native-crash", at_least="likely")
_LOOKS_LIKE_A_CRASH = expect(
    "native-crash<=likely other-signal",
    why="a signal sent with kill leaves the same traces as a real crash, so neither may be called certain",
)


def _both(name: str, program: str, expected: Expected, **more) -> tuple[Kind, Kind]:
    return (
        Kind(f"{name}-run", (program,), "run", acts.cue, expected, **more),
        Kind(f"{name}-watch", (program,), "watch", acts.cue, expected, **more),
    )


KINDS = (
    *_both("segfault", "segfault.py", _CRASH),
    Kind("segfault-in-thread-watch", ("segfault_in_thread.py",), "watch", acts.cue, _CRASH),
    Kind(
        "segfault-with-own-faulthandler-run",
        ("{python}", "-X", "faulthandler", "{programs}/segfault.py"),
        "run",
        acts.cue,
        expect(
            "native-crash",
            notes_only="recorder-lost",
            why="the script keeps its faulthandler's output to itself",
        ),
    ),
    *_both("segfault-at-interpreter-exit", "segfault_at_exit.py", _CRASH),
    Kind("segfault-sent-run", ("wait.py",), "run", acts.send(signal.SIGSEGV), _LOOKS_LIKE_A_CRASH),
    Kind("segfault-sent-watch", ("wait.py",), "watch", acts.send(signal.SIGSEGV), _LOOKS_LIKE_A_CRASH),
    *_both("abort", "abort.py", _CRASH),
    Kind("abort-sent-watch", ("wait.py",), "watch", acts.send(signal.SIGABRT), _LOOKS_LIKE_A_CRASH),
    Kind("cpp-terminate-run", ("cpp_terminate.py",), "run", acts.cue, _CRASH),
    Kind("double-free-watch", ("double_free.py",), "watch", acts.cue, _CRASH),
    *_both("division-by-zero-in-c", "divide.py", _CRASH, needs=("x86",)),
    Kind("division-sent-run", ("wait.py",), "run", acts.send(signal.SIGFPE), _LOOKS_LIKE_A_CRASH),
    *_both("illegal-instruction", "illegal.py", _CRASH, needs=("x86",)),
    Kind(
        "sigtrap-sent-run",
        ("wait.py",),
        "run",
        acts.send(signal.SIGTRAP),
        expect(
            "native-crash<=likely other-signal",
            notes_only="recorder-lost",
            why="faulthandler does not know SIGTRAP: only the status tells",
        ),
    ),
    *_both("bus-error-truncated-map", "bus_truncated.py", expect("bus-error native-crash")),
    *_both(
        "bus-error-shm-full",
        "bus_shm.py",
        expect("shm-full bus-error", notes_only="shm-full bus-error native-crash"),
        needs=("small-shm",),
    ),
    Kind(
        "bus-error-sent-run",
        ("wait.py",),
        "run",
        acts.send(signal.SIGBUS),
        expect(
            "bus-error<=likely native-crash<=likely other-signal",
            why="sent with kill it looks like a real one",
        ),
    ),
    *_both("c-stack-overflow", "stack_overflow.py", _CRASH),
)
