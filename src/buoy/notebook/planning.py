"""`%buoy plan [NAMES] [--on ID ...] [--batch N]`: will the training that this notebook holds fit."""

from __future__ import annotations

import difflib
import time
from typing import TYPE_CHECKING, Any

from buoy.errors import UsageError
from buoy.notebook.display import Output
from buoy.notebook.namespace import find
from buoy.units import format_duration
from buoy.view.lines_html import lines_html

if TYPE_CHECKING:
    from buoy.planner.model import Plan

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
    """The objects that the person named; `images,labels` is a batch of two."""
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
