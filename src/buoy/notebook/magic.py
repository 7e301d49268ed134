"""`%buoy VERB`: buoy's verbs for the notebook one is in."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from buoy.errors import BuoyError, UsageError
from buoy.flight.attempt import Attempt, find_attempt
from buoy.notebook.display import show, show_text

if TYPE_CHECKING:
    from buoy.notebook.extension import Extension

_HELP = """\
%buoy why      what ended the training here, or killed the kernel before this one, how sure that is, and how to go on
%buoy top      where the training is: steps, RAM, VRAM, disk and time against their limits
%buoy plan     whether the training in this notebook fits, here or elsewhere: `%buoy plan --on colab-t4`
%buoy check    the lines in the cells run so far that will end the session
%buoy report   one page about the run, written to its folder and shown here
%buoy profile  where the time of the next three steps goes and what holds memory, told when they are done
%buoy off      no more cards in this kernel"""


_TAKE_WORDS = ("plan", "profile")
_IN_PYTHON = {
    "why": 'another run\'s: `buoy.why("runs/cats")`',
    "top": "another run's: `!buoy top runs/cats --once`",
    "check": 'a file: `buoy.check("train.py")`',
    "report": "another run's: `!buoy report runs/cats`",
}
"""What to write for anything but this notebook's run."""


class Magic:
    """The line magic and its verbs."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._verbs: dict[str, Callable[[list[str]], Any]] = {
            "why": self._why,
            "top": self._top,
            "plan": self._plan,
            "check": self._check,
            "report": self._report,
            "profile": self._profile,
            "off": self._off,
        }

    def line(self, line: str) -> Any:
        """Run `%buoy VERB`; an error is shown in words, without a traceback."""
        words = line.split()
        verb = self._verbs.get(words[0]) if words else None
        if verb is None:
            shown = _HELP if not words else f"`{words[0]}` is none of buoy's verbs here\n{_HELP}"
            return show_text(shown)
        try:
            if words[1:] and words[0] not in _TAKE_WORDS:
                raise UsageError(
                    f"`%buoy {words[0]}` takes nothing more",
                    received=f"`%buoy {' '.join(words)}`",
                    expected=f"`%buoy {words[0]}`, about this notebook's own run",
                    hint=_IN_PYTHON.get(words[0]),
                )
            return verb(words[1:])
        except BuoyError as error:
            return show_text(str(error))

    def _attempt(self) -> Attempt:
        recorder = self._extension.recorder
        if recorder is not None and recorder.attempt is not None:
            return recorder.attempt
        return find_attempt(self._extension.folder)

    def _why(self, words: list[str]) -> None:
        """What left this kernel's training; then the card of the first cell again, else the kernel that ended last."""
        from dataclasses import replace

        from buoy.notebook.before import last_ended, lives
        from buoy.notebook.present import tell_of_this_kernel
        from buoy.verdict import why
        from buoy.view.card import verdict_card

        told, here = self._extension.told, self._attempt()
        was_told = self._extension.recorder is not None and tell_of_this_kernel(here)
        if told is None:
            last = last_ended(lives(here.run_folder))
            if last is None and was_told:
                return None
            if last is None:
                return show_text(
                    f"{here.run_folder} holds no recording of a kernel before this one that has ended"
                )
            told = find_attempt(here.run_folder, last.number)
        verdict = why(told.run_folder, told.number)
        if told.number != here.number:
            beside = f"; {verdict.beside}" if verdict.beside else ""
            verdict = replace(verdict, beside=f"this is about a kernel before this one{beside}")
        return show(verdict_card(verdict.to_json()), str(verdict))

    def _top(self, words: list[str]) -> None:
        from buoy.notebook.live import where
        from buoy.view.now import lines, state

        recorder = self._extension.recorder
        if recorder is None:
            return show_text("\n".join(lines(state(self._attempt()))))
        if recorder.attempt is not None:
            return show_text(where(recorder, is_asked=True))
        try:
            before = ["; the last recording:", *lines(state(self._attempt()))]
        except BuoyError:
            before = [""]
        return show_text("nothing is recorded of this kernel" + "\n".join(before))

    def _plan(self, words: list[str]) -> Any:
        from buoy.notebook.planning import plan

        made = plan(self._extension.shell, words)
        if self._extension.recorder is not None and self._extension.recorder.attempt is not None:
            from buoy.training import planned

            planned.record(made, self._extension.recorder.event)
        return made

    def _check(self, words: list[str]) -> Any:
        """What was run so far as a notebook, this cell included; `cell 3` of a finding is `In [3]`."""
        from buoy.view.findings_notebook import check_cells

        cells = self._extension.shell.user_ns.get("In") or []
        name = os.path.basename(self._extension.folder)  # the notebook's, where it is known
        return check_cells(f"{name}.ipynb", [str(cell) for cell in cells[1:]])

    def _report(self, words: list[str]) -> None:
        from buoy.text import printable
        from buoy.verdict.saved import from_here
        from buoy.view.history import read
        from buoy.view.report import page, write

        history = read(self._trained_last())
        text = page(history)
        path = os.path.join(history.folder, "report.html")
        try:
            write(path, text)
            told = f"about {printable(from_here(history.folder))}; written to {printable(from_here(path))}"
        except UsageError as error:  # a full disk: what can be read here is shown all the same
            told = str(error)
        frame = (
            f'<iframe srcdoc="{escape(text, quote=True)}" sandbox="allow-scripts" '
            'style="width:100%;height:640px;border:1px solid #8884;border-radius:6px"></iframe>'
        )
        show(f"{frame}<div>{escape(told)}</div>", told)

    def _trained_last(self) -> str:
        """The folder of the run that trained last in this notebook, in this kernel or one before; else its own."""
        from buoy.flight.attempt import attempts_of
        from buoy.verdict.asked import trained_last

        here = self._attempt()
        for attempt in reversed(attempts_of(here.run_folder)):
            folder = trained_last(attempt)
            if folder is not None:
                return folder
        return str(here.run_folder)

    def _profile(self, words: list[str]) -> None:
        from buoy.notebook.profiling import profile

        profile(words)

    def _off(self, words: list[str]) -> None:
        self._extension.stop()
        show_text("no more cards in this kernel; it is still recorded. `%reload_ext buoy` brings them back")
