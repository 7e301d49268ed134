"""Deaths in a family of processes: children, ranks, shells, and what they leave in the parent's name."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Act, Expected, Kind, Launch, expect, with_starved
from tests.deaths.kinds.memory import KILLED

_PASSED_ON = "a shell leaves no note, and what its command left need not be the end of it"

_WRAPPED = expect(
    "worker-killed",
    no_kernel_log="worker-killed kernel-oom<=likely killed<=likely",
    old_kernel="worker-killed exit-code killed<=likely native-crash<=likely",
    notes_only="recorder-lost worker-killed<=likely native-crash<=likely exit-code<=likely clean-exit<=possible",
    at_least="likely",
    coarse="exit-code",
    why=_PASSED_ON,
)
_MAKE = ("make", "--eval", "train: ; {python} {programs}/PROGRAM", "train")
_UNSHARE = ("unshare", "-pf", "{python}", "{programs}/PROGRAM")
_SETSID = ("setsid", "-w", "{python}", "{programs}/PROGRAM")
_TIMEOUT = ("timeout", "300", "{python}", "{programs}/PROGRAM")
_RELAY = ("relay.py", "{python}", "{programs}/PROGRAM")
_SHELL = ("sh", "-c", "{python} {programs}/PROGRAM || exit 3")
_LEAK = "leak.py 4 0.02"
_BY_KERNEL = "killed by the kernel's OOM killer"


def _wrapped(name: str, wrapper: tuple[str, ...], program: str, act: Act, says: str) -> Kind:
    """A program below a wrapper that answers for its death with a code of its own."""
    last = wrapper[-1] if wrapper[-1].endswith("PROGRAM") else ""
    words = (
        (*wrapper[:-1], *last.replace("PROGRAM", program).split())
        if last
        else tuple(word.replace("PROGRAM", program) for word in wrapper)
    )
    memory = 96 if program == _LEAK else None
    return Kind(f"{name}-run", words, "run", acts.followed(act), _WRAPPED, says=says, memory=memory)


_BROKEN_LINE = expect(
    "worker-killed<=likely",
    old_kernel="worker-killed<=likely python-exception<=likely",
    notes_only="python-exception<=likely worker-killed<=likely",
    at_least="likely",
    why="a line that breaks after a worker died was most likely that worker's",
)


def _worker(how: str, when: str, launch: Launch, says: str, expected: Expected = _BROKEN_LINE) -> Kind:
    """A worker that dies, of which the main process learns late, or that it outlives by long."""
    return Kind(
        f"worker-{how}-{when}-{launch}",
        ("dead_worker.py", how, when),
        launch,
        acts.followed(acts.cue),
        expected,
        says=says,
        memory=128 if how == "oom" else None,
        seconds=45.0,
    )


_WRAPPERS = (
    *with_starved(
        _wrapped("oom-under-make", _MAKE, _LEAK, acts.cue, _BY_KERNEL),
        _wrapped("oom-under-unshare", _UNSHARE, _LEAK, acts.cue, _BY_KERNEL),
        _wrapped("oom-under-setsid", _SETSID, _LEAK, acts.cue, _BY_KERNEL),
        _wrapped("oom-under-launcher", _RELAY, _LEAK, acts.cue, _BY_KERNEL),
        _wrapped("sigkill-under-make", _MAKE, "wait.py", acts.send(signal.SIGKILL), "killed with SIGKILL"),
        _wrapped("segfault-under-launcher", _RELAY, "segfault.py", acts.cue, "SIGSEGV"),
    ),
    _wrapped("oom-under-timeout", _TIMEOUT, _LEAK, acts.cue, _BY_KERNEL),
    _wrapped("sigkill-under-timeout", _TIMEOUT, "wait.py", acts.send(signal.SIGKILL), "killed with SIGKILL"),
    _wrapped("oom-under-sh-with-own-code", _SHELL, _LEAK, acts.cue, _BY_KERNEL),
    _wrapped("sigkill-under-unshare", _UNSHARE, "wait.py", acts.send(signal.SIGKILL), "killed with SIGKILL"),
    _wrapped("sigkill-under-setsid", _SETSID, "wait.py", acts.send(signal.SIGKILL), "killed with SIGKILL"),
    _wrapped("sigkill-under-launcher", _RELAY, "wait.py", acts.send(signal.SIGKILL), "killed with SIGKILL"),
    _wrapped("segfault-under-make", _MAKE, "segfault.py", acts.cue, "SIGSEGV"),
    _wrapped("segfault-under-unshare", _UNSHARE, "segfault.py", acts.cue, "SIGSEGV"),
    Kind(
        "oom-under-pipe-into-tee-run",
        ("sh", "-c", "{python} {programs}/leak.py 4 0.02 | tee log.txt"),
        "run",
        acts.cue,
        expect("clean-exit", notes_only="recorder-lost", why=_PASSED_ON),
        says=_BY_KERNEL,
        memory=96,
    ),
)

_WORKERS = (
    *with_starved(
        _worker("sigkill", "late", "run", "signal 9 (SIGKILL)"),
        _worker("segfault", "slow", "watch", "signal 11 (SIGSEGV)"),
        _worker("oom", "late", "watch", _BY_KERNEL),
        _worker("oom", "words", "run", _BY_KERNEL, expect("python-exception worker-killed<=likely")),
    ),
    _worker("sigkill", "slow", "watch", "signal 9 (SIGKILL)"),
    _worker("segfault", "late", "run", "signal 11 (SIGSEGV)"),
    _worker("oom", "slow", "run", _BY_KERNEL),
    _worker("oom", "late-socket", "run", _BY_KERNEL),
    _worker(
        "sigkill", "words", "watch", "signal 9 (SIGKILL)", expect("python-exception worker-killed<=likely")
    ),
)

KINDS = (
    *_WRAPPERS,
    *_WORKERS,
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
            why="the interpreter had already said that it was shutting down normally",
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
