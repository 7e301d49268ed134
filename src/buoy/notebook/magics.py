"""`%buoy VERB`: buoy's verbs for the notebook that they are typed in."""

from __future__ import annotations

import difflib
import os
import time
from html import escape
from typing import TYPE_CHECKING, Any

from buoy.errors import BuoyError, UsageError
from buoy.flight.attempt import Attempt, find_attempt
from buoy.flight.profile import WARM_UP, Profiling
from buoy.notebook.cards import Output, show, show_text, show_verdict
from buoy.notebook.namespace import find
from buoy.units import format_duration
from buoy.view.cards import lines_html

if TYPE_CHECKING:
    from buoy.notebook.extension import Extension
    from buoy.planner.result import Plan

_HELP = """\
%buoy why      what ended the training here, or killed the kernel before this one, how sure that is, and how to resume
%buoy top      where the training is: steps, RAM, VRAM, disk and time against their limits
%buoy plan     whether the training in this notebook fits, here or elsewhere: `%buoy plan --on colab-t4`
%buoy check    the lines in the cells run so far that will end the session
%buoy report   one page about the run, written to its folder and shown here
%buoy profile  where the time of the next three steps goes and what holds memory, reported when they are done
%buoy off      no more cards in this kernel"""


_ELSEWHERE = {
    "why": 'another run\'s: `buoy.why("runs/cats")`',
    "top": "another run's: `!buoy top runs/cats --once`",
    "check": 'a file: `buoy.check("train.py")`',
    "report": "another run's: `!buoy report runs/cats`",
    "off": None,
}
"""The verbs about this notebook's own run, and what to write for anything else."""


class Magic:
    """The line magic and its verbs."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def line(self, line: str) -> Any:
        """Run `%buoy VERB`; an error is shown in words, without a traceback."""
        verb, *words = line.split() or [""]
        try:
            if verb == "plan":
                return self._plan(words)
            if verb == "profile":
                return profile(words)
            if verb not in _ELSEWHERE:
                return show_text(f"`{verb}` is not one of buoy's verbs here\n{_HELP}" if verb else _HELP)
            if words:
                raise UsageError(
                    f"`%buoy {verb}` takes no further arguments",
                    received=f"`%buoy {verb} {' '.join(words)}`",
                    expected=f"`%buoy {verb}`, about this notebook's own run",
                    hint=_ELSEWHERE[verb],
                )
            return getattr(self, f"_{verb}")()
        except BuoyError as error:
            return show_text(str(error))

    def _attempt(self) -> Attempt:
        recorder = self._extension.recorder
        if recorder is not None and recorder.attempt is not None:
            return recorder.attempt
        return find_attempt(self._extension.folder)

    def _why(self) -> None:
        """What left this kernel's training; then the card of the first cell again, else the kernel that ended last."""
        from dataclasses import replace

        from buoy.notebook.extension import last_ended, lives, show_error_of_this_kernel
        from buoy.verdict import why

        told, here = self._extension.told, self._attempt()
        was_told = self._extension.recorder is not None and show_error_of_this_kernel(here)
        if told is None:
            last = last_ended(lives(here.run_folder))
            if last is None and was_told:
                return None
            if last is None:
                return show_text(f"{here.run_folder} holds no recording of an earlier kernel that has ended")
            told = find_attempt(here.run_folder, last.number)
        verdict = why(told.run_folder, told.number)
        if told.number != here.number:
            beside = f"; {verdict.beside}" if verdict.beside else ""
            verdict = replace(verdict, beside=f"this is about an earlier kernel{beside}")
        return show_verdict(verdict)

    def _top(self) -> None:
        from buoy.notebook.cards import where
        from buoy.view.top import lines, state

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
        made = plan(self._extension.shell, words)
        if self._extension.recorder is not None and self._extension.recorder.attempt is not None:
            from buoy.training import recording

            recording.record_plan(made, self._extension.recorder.event)
        return made

    def _check(self) -> Any:
        """What was run so far as a notebook, this cell included; `cell 3` of a finding is `In [3]`."""
        from buoy.view.findings import check_cells

        cells = self._extension.shell.user_ns.get("In") or []
        name = os.path.basename(self._extension.folder)  # the notebook's, where it is known
        return check_cells(f"{name}.ipynb", [str(cell) for cell in cells[1:]])

    def _report(self) -> None:
        from buoy.text import printable
        from buoy.verdict.advice import from_here
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
        from buoy.verdict.select import trained_last

        here = self._attempt()
        for attempt in reversed(attempts_of(here.run_folder)):
            folder = trained_last(attempt)
            if folder is not None:
                return folder
        return str(here.run_folder)

    def _off(self) -> None:
        self._extension.stop()
        show_text("no more cards in this kernel; it is still recorded. `%reload_ext buoy` brings them back")


_USAGE = "%buoy plan [model batch optimizer loss] [--on colab-t4 ...] [--batch N]"


def plan(shell: Any, words: list[str]) -> Plan:
    """The plan; which names it is made of is shown first. The step is traced in another process."""
    from buoy.planner.plan import plan as planned
    from buoy.planner.targets import THIS

    expressions, on, size = _parsed(words)
    found = find(shell.user_ns, _named(shell, expressions))
    size = size or found.batch_size
    told = _Told(f"planning with {', '.join(found.words)}; nothing is trained")
    made = planned(
        found.model, found.batch, found.optimizer, found.loss, on=on or THIS, batch_size=size, say=told
    )
    told("done")
    return made


class _Told:
    """Lines below the cell, one display: a large model takes minutes, and what is known already is worth reading."""

    def __init__(self, first: str) -> None:
        self._began = time.monotonic()
        self._lines = [first]
        self._output = Output()
        self._show()

    def __call__(self, text: str) -> None:
        self._lines.append(f"{format_duration(round(time.monotonic() - self._began)):>10}  {text}")
        self._show()

    def _show(self) -> None:
        text = "\n".join(self._lines)
        self._output.show(lines_html(text), text)


def _parsed(words: list[str]) -> tuple[list[str], list[str], int | None]:
    expressions: list[str] = []
    on: list[str] = []
    size = None
    rest = iter(words)
    into = expressions
    for word in rest:
        if word == "--on":
            into = on
        elif word == "--batch":
            text = next(rest, "")
            if not text.isdigit() or not int(text):
                raise UsageError("`--batch` takes a number", received=text or "nothing", expected=_USAGE)
            size, into = int(text), expressions
        elif word.startswith("-"):
            raise UsageError("unknown option", received=word, expected=_USAGE,
                             hint="`buoy.plan(model, batch, on=..., steps=...)` takes everything else")  # fmt: skip
        else:
            into.append(word)
    return expressions, on, size


def _named(shell: Any, expressions: list[str]) -> dict[str, Any]:
    """The objects that the user named; `images,labels` is a batch of two."""
    named: dict[str, Any] = {}
    for text in expressions:
        try:
            value = shell.ev(text)
        except NameError:
            near = difflib.get_close_matches(text, [name for name in shell.user_ns if name[0] != "_"], 1)
            raise UsageError("there is no such name in this notebook", received=f"`{text}`", expected=_USAGE,
                             hint=f"did you mean `{near[0]}`?" if near else None) from None  # fmt: skip
        except Exception as error:
            raise UsageError("cannot read what to plan", received=f"`{text}` ({error})", expected=_USAGE,
                             hint="names without spaces, such as `model images,labels`") from error  # fmt: skip
        named[text] = value
    return named


_STEPS = 3


def profile(words: list[str]) -> None:
    """Ask whichever training takes the next step: a guard may yet be made, inside the call of `fit`."""
    text = words[0] if words else str(_STEPS)
    if not text.isdigit() or not int(text) or len(words) > 1:
        raise UsageError(
            "`%buoy profile` takes a number of steps", received=" ".join(words), expected="`%buoy profile 5`"
        )
    Profiling.of_next_training = int(text)
    show_text(
        f"{text} steps of the next training with `buoy.Run`, `buoy.keras.Guard` or `buoy.keras.Loop` are profiled, "
        f"after {WARM_UP} that only warm up; what they were spent on is printed when they are done, or when the "
        "training ends before"
    )
