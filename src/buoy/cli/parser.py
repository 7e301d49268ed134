"""argparse, with errors that speak as the rest of buoy does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import NoReturn

from buoy.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors instead of an exit."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_run(self) -> None:
        """The run that a verb is about."""
        self.add_argument(
            "run",
            nargs="?",
            metavar="RUN",
            help="run folder (default: here or in runs/, the one written to last)",
        )

    def takes_value(self, word: str) -> bool:
        """Whether this option is followed by a word of its own."""
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs is None

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting: `run` and the others have different exit codes."""
        hint = f"`{self.prog} --help`"
        _, _, unknown = message.partition("unrecognized arguments: ")
        for word in unknown.split():
            if word.startswith("-"):
                hint = _nearest(word.partition("=")[0], self._option_string_actions) or hint
                break
        raise UsageError(message, expected=self.usage, hint=hint)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """argparse's own check, with the nearest of the choices."""
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            name = next(iter(action.option_strings), action.dest)
            raise UsageError(
                f"unknown {name}",
                received=repr(value),
                expected=", ".join(choices),
                hint=_nearest(str(value), choices) or f"`{self.prog} --help`",
            )


def agreed(question: str) -> bool:
    """Ask on the terminal; what is not a yes is a no."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _nearest(word: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else None
