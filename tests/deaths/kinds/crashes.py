"""Deaths in native code, and signals sent by hand that look like them."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Expected, Kind, expect, with_starved

_CRASH = expect("native-crash", at_least="likely")
_FAULT = expect("native-crash", at_least="certain")  # the kernel itself said so to the process
_SENT = expect("other-signal native-crash<=likely")


def _both(name: str, program: str, expected: Expected, **more) -> tuple[Kind, Kind]:
    return (
        Kind(f"{name}-run", (program,), "run", acts.cue, expected, **more),
        Kind(f"{name}-watch", (program,), "watch", acts.cue, expected, **more),
    )


KINDS = (
    *_both("segfault", "segfault.py", _FAULT),
    Kind("segfault-in-thread-watch", ("segfault_in_thread.py",), "watch", acts.cue, _FAULT),
    Kind("segfault-starved-watch", ("segfault.py",), "watch", acts.cue, _FAULT, starved=True, seconds=120.0),
    Kind(
        "segfault-in-isolated-python-run",
        ("{python}", "-I", "{programs}/isolated.py", "{stage}", "segfault"),
        "run",
        acts.cue,
        expect(
            "native-crash",
            no_kernel_log="native-crash<=likely",
            notes_only="recorder-lost",
            at_least="certain",
            why="`python -I` cannot be instrumented: it leaves no note, but the kernel logs its fault",
        ),
    ),
    *with_starved(
        Kind(
            "segfault-with-core-run",
            ("sh", "-c", "ulimit -c unlimited; exec {python} {programs}/segfault.py"),
            "run",
            acts.cue,
            _FAULT,
        ),
    ),
    Kind(
        "segfault-with-own-faulthandler-run",
        ("{python}", "-X", "faulthandler", "{programs}/segfault.py"),
        "run",
        acts.cue,
        expect(
            "native-crash",
            notes_only="recorder-lost native-crash<=likely",
            at_least="certain",
            why="the script keeps its faulthandler's output to itself",
        ),
    ),
    *_both("segfault-at-interpreter-exit", "segfault_at_exit.py", _CRASH),
    Kind(
        "exception-then-segfault-at-exit-run",
        ("exception_then_segfault_at_exit.py",),
        "run",
        acts.cue,
        expect(
            "python-exception<=likely",
            at_least="likely",
            notes_only="python-exception native-crash<=likely",
            why="both left a note, and nothing says which came last",
        ),
        says="it then crashed, while the interpreter was shutting down",
    ),
    Kind("segfault-sent-run", ("wait.py",), "run", acts.send(signal.SIGSEGV), _SENT),
    Kind("segfault-sent-watch", ("wait.py",), "watch", acts.send(signal.SIGSEGV), _SENT),
    *_both("abort", "abort.py", _CRASH),
    Kind("abort-sent-watch", ("wait.py",), "watch", acts.send(signal.SIGABRT), _SENT),
    Kind("cpp-terminate-run", ("cpp_terminate.py",), "run", acts.cue, _CRASH),
    Kind("double-free-watch", ("double_free.py",), "watch", acts.cue, _CRASH),
    *_both("division-by-zero-in-c", "divide.py", _FAULT, needs=("x86",)),
    Kind("division-sent-run", ("wait.py",), "run", acts.send(signal.SIGFPE), _SENT),
    *_both("illegal-instruction", "illegal.py", _FAULT, needs=("x86",)),
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
