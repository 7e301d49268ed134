"""Showing things below a cell: HTML where the front end can, text elsewhere."""

from __future__ import annotations

from typing import Any

from buoy.view.lines_html import lines_html


def show(html: str, text: str) -> None:
    """Display once."""
    Output().show(html, text)


def show_text(text: str) -> None:
    """Lines as they are."""
    show(lines_html(text), text)


class Output:
    """One output below a cell, drawn anew in its place each time."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Display, or replace what is displayed."""
        from IPython.display import display

        content = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(content, raw=True)
