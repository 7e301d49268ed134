"""What a kind of death is: a program, how it is launched, what is done to it, and what may be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.deaths.scene import Scene

Act = Callable[["Scene"], None]
Launch = Literal["run", "watch"]

GRADES = ("possible", "likely", "certain")
MODES = ("full", "no-kernel-log", "old-kernel", "notes-only")


@dataclass(frozen=True, slots=True)
class Answer:
    """A cause that may be named, and how sure it may at most be called: more would be a claim unproven."""

    cause: str
    at_most: str = "certain"

    @classmethod
    def parse(cls, text: str) -> Answer:
        """From `kernel-oom` or `native-crash<=likely`."""
        cause, _, grade = text.partition("<=")
        if grade and grade not in GRADES:
            raise ValueError(f"unknown grade in {text!r}")
        return cls(cause, grade or "certain")


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answers in each evidence mode.

    A mode that is not given accepts what `full` accepts. "I cannot tell" is an answer like any other and must
    be listed; `why` says in one line what makes it right.
    """

    full: tuple[Answer, ...]
    no_kernel_log: tuple[Answer, ...]
    old_kernel: tuple[Answer, ...]
    notes_only: tuple[Answer, ...]
    at_least: str | None
    coarse: tuple[str, ...]
    """Causes that are true but say too little (an exception, where its reason can be told): not right, no lie."""
    why: str

    def answers(self, mode: str) -> tuple[Answer, ...]:
        """The right answers in this mode."""
        answers: tuple[Answer, ...] = getattr(self, mode.replace("-", "_"))
        return answers


def expect(
    full: str,
    *,
    no_kernel_log: str | None = None,
    old_kernel: str | None = None,
    notes_only: str | None = None,
    at_least: str | None = None,
    coarse: str = "",
    why: str = "",
) -> Expected:
    """Right answers as a few words: `"killed unknown<=possible"`; `at_least` the grade due in full mode."""

    def parse(text: str | None) -> tuple[Answer, ...]:
        return tuple(Answer.parse(word) for word in (full if text is None else text).split())

    return Expected(
        parse(full),
        parse(no_kernel_log),
        parse(old_kernel),
        parse(notes_only),
        at_least,
        tuple(coarse.split()),
        why,
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to die."""

    name: str
    command: tuple[str, ...]
    """`("leak.py", "4")` is that program run by this Python; other commands are taken as they stand, with
    `{python}`, `{programs}`, `{stage}`, `{disk}` and `{other}` (a second memory group) filled in."""
    launch: Launch
    act: Act
    expected: Expected
    alive: Expected | None = None
    """What must be said while it hangs, before it is killed."""
    says: str = ""
    """Words that what was said at the time must contain somewhere."""
    steps: int = 0
    """At least so many steps must have been counted."""
    memory: int | None = None
    """Limit in MiB of the memory group that holds everything of the trial, as a container would."""
    needs: tuple[str, ...] = ()
    """Of `nested-cgroup`, `other-cgroup`, `pids-cgroup`, `cpu-cgroup`, `disk`, `small-shm`, `pid-namespace`, `x86`, or
    the name of an installed package."""
    options: tuple[str, ...] = ()
    """Further options of `buoy run`."""
    environment: tuple[tuple[str, str], ...] = ()
    run_folder: str = "{stage}/run"
    starved: bool = False
    """Whether everything of the trial shares a twentieth of a core, from when the recorder is at work."""
    below: bool = False
    """Whether what is launched starts the process that is recorded: a server its kernel."""
    seconds: float = 30.0
    """Patience with one trial."""

    def requirements(self) -> tuple[str, ...]:
        """Everything the machine must offer."""
        groups = (*(("memory-cgroup",) if self.memory else ()), *(("cpu-cgroup",) if self.starved else ()))
        return (*groups, *self.needs)


def with_starved(*kinds: Kind) -> tuple[Kind, ...]:
    """These kinds, and each of them once more on a twentieth of a core."""
    return (*kinds, *map(_starved, kinds))


def _starved(kind: Kind) -> Kind:
    name = f"{kind.name.removesuffix(f'-{kind.launch}')}-starved-{kind.launch}"
    return replace(kind, name=name, starved=True, seconds=kind.seconds + 90.0)
