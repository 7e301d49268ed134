"""Deaths by a signal that somebody sent."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Kind, expect
from tests.deaths.kinds.memory import KILLED

_TERMINATED = expect("terminated", at_least="certain")
_NO_NOTE = "this signal leaves no note: the status alone tells it"


def _other(old_kernel: str = "unknown", notes_only: str = "recorder-lost", full: str = "other-signal"):
    return expect(full, old_kernel=old_kernel, notes_only=notes_only, why=_NO_NOTE)


KINDS = (
    *(
        Kind(f"sigkill-{launch}", ("wait.py",), launch, acts.send(signal.SIGKILL), KILLED)
        for launch in ("run", "watch")
    ),
    Kind("sigkill-in-memory-group-run", ("wait.py",), "run", acts.send(signal.SIGKILL), KILLED, memory=200),
    Kind("sigkill-at-birth-run", ("wait.py",), "run", acts.kill_at_birth, KILLED),
    Kind("sigkill-by-itself-watch", ("suicide.py",), "watch", acts.cue, KILLED),
    Kind(
        "sigkill-torch-loop-run",
        ("torch_step_forever.py",),
        "run",
        acts.send(signal.SIGKILL),
        KILLED,
        steps=20,
        needs=("torch",),
    ),
    Kind(
        "sigkill-keras-fit-run",
        ("keras_fit.py",),
        "run",
        acts.send(signal.SIGKILL),
        KILLED,
        steps=20,
        needs=("tensorflow",),
    ),
    *(
        Kind(f"sigterm-{launch}", ("wait.py",), launch, acts.send(signal.SIGTERM), _TERMINATED)
        for launch in ("run", "watch")
    ),
    Kind(
        "sigterm-to-launcher-run", ("wait.py",), "run", acts.send(signal.SIGTERM, to="launcher"), _TERMINATED
    ),
    *(
        Kind(
            f"sigterm-answered-with-exit-0-{launch}",
            ("sigterm_exit0.py",),
            launch,
            acts.send(signal.SIGTERM),
            expect("clean-exit terminated"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigterm-ignored-then-sigkill-{launch}",
            ("sigterm_ignored.py",),
            launch,
            acts.send(signal.SIGTERM, signal.SIGKILL),
            expect(
                "killed terminated",
                old_kernel="unknown killed<=likely terminated",
                notes_only="recorder-lost terminated",
                why="an ignored signal is not seen by anyone",
            ),
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "sigterm-while-saving-then-sigkill-watch",
        ("sigterm_saving.py",),
        "watch",
        acts.send(signal.SIGTERM, signal.SIGKILL, pause=0.5),
        expect("terminated"),
    ),
    Kind(
        "sigterm-to-launcher-then-sigkill-run",
        ("sigterm_ignored.py",),
        "run",
        acts.send(signal.SIGTERM, signal.SIGKILL, pause=0.5, to="launcher-then-main"),
        expect("terminated", notes_only="recorder-lost", why="only the launcher's log knows of the signal"),
    ),
    *(
        Kind(
            f"sigterm-survived-then-segfault-{launch}",
            ("sigterm_survived_then_segfault.py",),
            launch,
            acts.signal_then_cue(signal.SIGTERM, 1.0),
            expect("native-crash"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigint-{launch}",
            ("wait.py",),
            launch,
            acts.send(signal.SIGINT),
            expect("interrupted", at_least="certain"),
        )
        for launch in ("run", "watch")
    ),
    Kind(
        "sigint-answered-with-130-run",
        ("sigint_exit_130.py",),
        "run",
        acts.send(signal.SIGINT),
        expect(
            "exit-code interrupted",
            notes_only="exit-code clean-exit<=likely interrupted recorder-lost",
            why="the note says that it shut down cleanly, not with which code",
        ),
    ),
    Kind(
        "sigint-to-launcher-run",
        ("wait.py",),
        "run",
        acts.send(signal.SIGINT, to="launcher"),
        expect("interrupted", at_least="certain"),
    ),
    *(
        Kind(
            f"sighup-{launch}",
            ("wait.py",),
            launch,
            acts.send(signal.SIGHUP),
            expect("hangup", at_least="certain"),
        )
        for launch in ("run", "watch")
    ),
    *(
        Kind(
            f"sigquit-{launch}",
            ("wait.py",),
            launch,
            acts.send(signal.SIGQUIT),
            expect("other-signal", at_least="certain"),
        )
        for launch in ("run", "watch")
    ),
    Kind("sigusr1-run", ("wait.py",), "run", acts.send(signal.SIGUSR1), _other()),
    Kind("sigusr2-watch", ("wait.py",), "watch", acts.send(signal.SIGUSR2), _other()),
    Kind("sigrtmin9-run", ("wait.py",), "run", acts.send(signal.SIGRTMIN + 9), _other()),
    Kind("sigalrm-run", ("sigalrm.py",), "run", acts.cue, _other()),
    Kind("sigalrm-watch", ("sigalrm.py",), "watch", acts.cue, _other()),
    Kind("sigpipe-run", ("sigpipe.py",), "run", acts.cue, _other()),
    Kind("sigpipe-watch", ("sigpipe.py",), "watch", acts.cue, _other()),
    Kind(
        "sigxcpu-sent-run",
        ("wait.py",),
        "run",
        acts.send(signal.SIGXCPU),
        expect("other-signal cpu-limit<=likely", why="no limit was set: nothing proves that one was reached"),
    ),
    Kind(
        "sigxfsz-sent-watch",
        ("default_signal.py", "SIGXFSZ"),
        "watch",
        acts.send(signal.SIGXFSZ),
        _other(full="other-signal file-size-limit<=likely"),
    ),
)
