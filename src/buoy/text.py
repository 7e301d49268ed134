"""Foreign text on its way to a screen, and words on their way to a number.

File names, messages of other programs, the code of a notebook, what a damaged file says: all of it may hold what a
terminal obeys (escape sequences, letters that run backwards) and what a CI log obeys (a line that begins with `::`).
Whatever buoy prints of it goes through `visible` or `printable`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

_SURROGATES = ("\ud800", "\udfff")


def visible(text: str) -> str:
    """The text as one line that no terminal acts on: each sign that it would act on is a space; tabs stay.

    >>> visible("red: \\x1b[31m, next:\\n::error::no"), visible("caf\\udce9")
    ('red:  [31m, next: ::error::no', 'caf\ufffd')
    """
    return text if text.isprintable() else "".join(map(_visible_sign, text))


def _visible_sign(sign: str) -> str:
    if sign.isprintable() or sign == "\t":
        return sign
    return "\ufffd" if _SURROGATES[0] <= sign <= _SURROGATES[1] else " "


def joined(lines: Iterable[str]) -> str:
    """Lines of ours with foreign words in them, as a text of just so many lines."""
    return "\n".join(map(visible, lines))


def printable(value: str, most: int = 300) -> str:
    """One line that is safe to show, without the room between its words, and cut in the middle.

    >>> printable("a\\n\\n  b \\x00 c"), printable("x" * 1000, 24)
    ('a b c', 'xxxxxxxxxxxxxxxx ... xxx')
    """
    if len(value) > 8 * most:  # the rest would be cut off after all
        value = f"{value[: 4 * most]} ... {value[-4 * most :]}"
    line = " ".join(visible(value).split())
    return line if len(line) <= most else f"{line[: most * 2 // 3]} ... {line[-most // 3 + 5 :]}"


def typed(path: str) -> str:
    """A path as a word of a command that can be pasted.

    >>> typed("runs/my notebook (1)"), typed("runs/cats")
    ("'runs/my notebook (1)'", 'runs/cats')
    """
    from shlex import quote  # loaded in every training: only where it is needed

    return quote(path) if path.isprintable() else quote(printable(path))


def json_text(value: object, indent: int | None = 2) -> str:
    """A result for programs: what JSON has no number for (a loss that is NaN) is null.

    >>> json_text({"loss": float("nan"), "step": 3}, None)
    '{"loss": null, "step": 3}'
    """
    import json

    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def whole_number(word: str) -> int | None:
    """What plain digits say; None for anything else, such as `²`, or a number that nothing is counted by.

    >>> whole_number("0042"), whole_number("²"), whole_number("-1"), whole_number("9" * 40)
    (42, None, None, None)
    """
    return int(word) if len(word) <= 18 and word.isascii() and word.isdigit() else None
