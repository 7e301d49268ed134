"""Loading buoy into a kernel: the recorder starts, and the first cell shows what killed the previous kernel.

The kernels that recorded into this folder (scripts do not count), and what ended a training in this one.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from buoy.errors import RunFolderError, trouble
from buoy.fields import count, number
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, attempt_numbers, find_attempt, is_kernel, is_run
from buoy.flight.imports import after_import
from buoy.flight.recorder import Recorder
from buoy.machine.files import read_json
from buoy.notebook.cards import LiveCard, show_text, show_verdict
from buoy.notebook.magics import Magic
from buoy.supervisor.watch import watch
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict import verdict_on, why
from buoy.verdict.advice import from_here, last_save, loop_without_a_run
from buoy.verdict.evidence import Evidence
from buoy.verdict.evidence import load as load_evidence
from buoy.verdict.model import Verdict
from buoy.verdict.notebook import error_name, in_a_line, stories
from buoy.verdict.select import part_in

# A kernel that ended in order, or still lives, needs no word.
_NO_NEWS = ("clean-exit", "still-running")
_MOST = 3
"""Kernels that are shown at once."""
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


class Extension:
    """buoy in this kernel, from `%load_ext buoy` to `%unload_ext buoy` (or `%buoy off`)."""

    def __init__(self, shell: Any, folder: str) -> None:
        self.shell = shell
        self.folder = folder
        self.recorder: Recorder | None = None
        self.told: Attempt | None = None
        """The kernel whose end the first cell showed."""
        self._live: LiveCard | None = None
        self._waiting = False

    def start(self) -> None:
        """In a cell: show the last death and record at once. In a start-up file: do both when the first cell runs."""
        self.shell.register_magic_function(Magic(self).line, "line", "buoy")
        if is_in_a_cell(self.shell):
            self._begin()
        else:
            self._waiting = True
            self.shell.events.register("pre_run_cell", self._first_cell)

    def stop(self) -> None:
        """No further card or message. The recorder keeps running: it costs nothing and may be needed."""
        self._stop_waiting()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _first_cell(self, info: Any = None) -> None:
        self._stop_waiting()
        if is_run(self.folder):
            self._begin()
            return
        # Loaded by itself in every kernel: a notebook that trains nothing gets no folder.
        for framework in _FRAMEWORKS:
            after_import(framework, self.record)

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self.shell.events.unregister("pre_run_cell", self._first_cell)

    def _begin(self) -> None:
        try:
            self._show_the_last()
        except Exception as error:  # noqa: BLE001 - a damaged folder must not break the first cell
            trouble("the card of the previous kernel", error)
        self.record()

    def _show_the_last(self) -> None:
        """The kernels of this folder that died since one began here: several, where several lived at once."""
        if not is_run(self.folder):
            return
        own = recorder.current()
        here = own.attempt.number if own is not None and own.attempt is not None else None
        known = [life for life in lives(self.folder) if life.number != here]
        dead = [verdict for life in unseen(known) if (verdict := death(self.folder, life)) is not None]
        for verdict in dead[:_MOST]:
            _show_death(verdict, self.folder)
        if not dead:
            return
        self.told = find_attempt(self.folder, dead[0].attempt)
        if len(dead) > 1 or any(life.ended is None for life in known):
            show_text(
                f"buoy: more than one kernel recorded into {printable(from_here(self.folder))}: "
                f"attempt {dead[0].attempt} may not have been this notebook's"
            )

    def record(self) -> None:
        """Record this kernel, once."""
        if self.recorder is None:
            self.recorder = watch(self.folder)
            self._live = LiveCard(self.shell, self.recorder)


def _show_death(verdict: Verdict, folder: str) -> None:
    """A card; one line for what a restart does to a kernel between two cells."""
    try:
        line = in_a_line(verdict, load_evidence(find_attempt(folder, verdict.attempt).folder))
    except Exception as error:  # noqa: BLE001 - as below: then the card says it
        trouble("the line about the previous kernel", error)
        line = None
    if line is not None:
        show_text(f"buoy: {line}")
    else:
        show_verdict(verdict)


def death(folder: str, life: Life) -> Verdict | None:
    """What killed this kernel; None when nothing did, or it is unknown."""
    try:
        verdict = why(folder, life.number)
    except RunFolderError:
        return None
    except Exception as error:  # noqa: BLE001 - one damaged recording must not hide the others
        trouble(f"the verdict on attempt {life.number}", error)
        return None
    return None if verdict.cause.id in _NO_NEWS else verdict


def is_in_a_cell(shell: Any) -> bool:
    """Whether a cell is running now: what is displayed outside of one is shown nowhere."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True  # the terminal's IPython prints at any time
    try:
        parent = kernel.get_parent("shell") if hasattr(kernel, "get_parent") else kernel._parent_header
    except Exception as error:  # noqa: BLE001 - a kernel of another kind: then show at once
        trouble("whether a cell is running", error)
        return True
    return bool(parent) and parent.get("header", {}).get("msg_type") == "execute_request"


def run_folder_of(shell: Any) -> str:
    """Where this kernel is recorded already (`buoy.watch()` came first); `runs/<notebook>` if the front end tells its
    name; else `runs/notebook`."""
    own = recorder.current()
    if own is not None and own.folder is not None:
        return str(own.folder)
    known = os.environ.get("JPY_SESSION_NAME") or shell.user_ns.get("__vsc_ipynb_file__")
    name = os.path.splitext(os.path.basename(str(known or "")))[0].lstrip(".")[:80]
    return os.path.join("runs", name or "notebook")


_loaded: Extension | None = None


def load(shell: Any) -> None:
    """What `%load_ext buoy` calls."""
    global _loaded
    if _loaded is None:
        _loaded = Extension(shell, run_folder_of(shell))
        _loaded.start()


def unload(shell: Any) -> None:
    """What `%unload_ext buoy` calls."""
    global _loaded
    if _loaded is not None:
        _loaded.stop()
        _loaded = None


class Life(NamedTuple):
    """One kernel, or one IPython in a terminal, from its first recorded cell on. Times are of the wall clock."""

    number: int
    """Its attempt in the folder."""
    began: float
    ended: float | None
    """None: it lives."""


def lives(folder: str) -> list[Life]:
    """All kernels that recorded here, the one that asks included, by their numbers."""
    found = []
    for index in attempt_numbers(folder):
        attempt = os.path.join(folder, "attempts", f"{index:04d}")
        about = read_json(os.path.join(attempt, "attempt.json")) or {}
        if is_session(about.get("command")):
            began = number(about.get("wall")) or 0.0
            found.append(Life(index, began, _ended(attempt, began)))
    return found


def _ended(attempt: str, began: float) -> float | None:
    death = read_json(os.path.join(attempt, "death.json")) or {}
    wall = number(death.get("wall"))
    if wall is not None:  # all that is read of most: a folder may hold hundreds
        return wall
    evidence = load_evidence(attempt)
    if not evidence.is_dead:
        return None
    return evidence.last_wall if evidence.last_wall is not None else began


def unseen(known: list[Life]) -> list[Life]:
    """Those that ended since the last kernel began here, the latest end first: that one showed all ends before it."""
    ended = [
        (life.ended, life)
        for life in known
        if life.ended is not None
        and not any(other.number > life.number and other.began >= life.ended for other in known)
    ]
    return [life for _, life in sorted(ended, reverse=True)]


def last_ended(known: list[Life]) -> Life | None:
    """The kernel that ended last; None when none did."""
    return max(
        (life for life in known if life.ended is not None), key=lambda life: life.ended or 0.0, default=None
    )


def is_session(command: object) -> bool:
    """Whether cells are typed into a recorded command: a notebook's kernel, or IPython in a terminal.

    >>> is_session(["python", "/usr/bin/ipython3"]), is_session(["python", "train.py"])
    (True, False)
    """
    words = command[:2] if isinstance(command, list) else []
    return is_kernel(command) or any(
        os.path.basename(str(word).removesuffix("/__main__.py")).lower().startswith("ipython")
        for word in words
    )


def show_error_of_this_kernel(attempt: Attempt) -> bool:
    """Show how the training that this kernel was at last was left by an exception; False where none was."""
    evidence = load_evidence(attempt.folder)
    told = stories(evidence)
    if told and told[0][2].error is not None and not told[0][2].is_followed_by_a_loop:
        verdict = verdict_on(part_in(attempt, told[0][0]))
        show_verdict(verdict)
        return True
    words = _of_another_cell(evidence)
    if words is not None:
        show_text(words)
    return words is not None


def _of_another_cell(evidence: Evidence) -> str | None:
    """The exception of a cell in which no run trained, where nothing has trained since, and what a loop had done."""
    kinds = ("training", "loop", "cell-error")
    told = [event for event in evidence.events if event.get("kind") in kinds]
    last = told[-1] if told else {}
    if last.get("kind") != "cell-error" or last.get("runs"):
        return None
    message = printable(str(last.get("message") or ""), 160)
    wall = number(last.get("wall"))
    ago = f", {format_duration(max(0.0, evidence.now.wall - wall))} ago" if wall is not None else ""
    words = f"in this kernel a cell ended with {error_name(last)}: {message}".rstrip(": ") + ago
    is_a_loop = not evidence.events_of("training") or loop_without_a_run(evidence) is not None
    steps = count(last.get("step")) if is_a_loop else None
    if not steps:
        return words
    saved = last_save(evidence)
    kept = f"last saved: {saved.path}" if saved is not None else "no checkpoint of that was seen"
    return f"{words}; a loop without a run had trained to step {steps}: {kept}"
