"""Loading buoy into a kernel: the recorder starts, and the first cell shows what killed the previous kernel."""

from __future__ import annotations

import os
from typing import Any

from buoy.errors import RunFolderError, trouble
from buoy.flight import recorder
from buoy.flight.attempt import Attempt, find_attempt, is_run
from buoy.flight.imports import after_import
from buoy.flight.recorder import Recorder
from buoy.notebook.cards import LiveCard, show, show_text
from buoy.notebook.kernels import Life, lives, unseen
from buoy.notebook.magics import Magic
from buoy.supervisor.watch import watch
from buoy.text import printable
from buoy.verdict import why
from buoy.verdict.advice import from_here
from buoy.verdict.evidence import load as load_evidence
from buoy.verdict.model import Verdict
from buoy.verdict.notebook import in_a_line
from buoy.view.cards import verdict_card

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
        show(verdict_card(verdict.to_json()), str(verdict))


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
