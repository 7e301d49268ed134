"""Lines of plain text as HTML: columns stay columns whatever a notebook's page does to `<pre>`."""

from __future__ import annotations

from html import escape

# JupyterLab's page sets its own, proportional font for `<pre>` and breaks words anywhere: bars and tables fall apart.
_TEXT = "font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;word-break:normal;background:none"
_BOX = ";border:1px solid #8884;border-radius:6px;padding:8px 12px"


def lines_html(text: str, *, boxed: bool = False) -> str:
    """The lines, in the page's own colours; `boxed` with a frame around them."""
    return f'<pre style="{_TEXT}{_BOX if boxed else ""}">{escape(text)}</pre>'
