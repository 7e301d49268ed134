"""argparse, with errors that speak as the rest of buoy does."""

from __future__ import annotations

import argparse
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

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting: `run` and the others have different exit codes."""
        raise UsageError(message, expected=self.usage, hint=f"`{self.prog} --help`")
