"""How buoy reads and writes quantities: binary bytes, durations, shares. The only place that formats them."""

from __future__ import annotations

from buoy.errors import UsageError

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LARGEST = 1e18
"""No quantity of a machine is larger: what says so (or is no number at all) comes from damage."""
_BYTE_FACTORS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_SECONDS = {
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86400.0,
}


def format_bytes(count: float | None) -> str:
    """Bytes for users; unknown is `n/a`, never 0.

    >>> format_bytes(13609422848), format_bytes(512), format_bytes(None), format_bytes(float("nan"))
    ('12.7 GiB', '512 B', 'n/a', 'n/a')
    """
    if count is None or not -_LARGEST < count < _LARGEST:
        return "n/a"
    size = float(count)
    for unit in _BYTE_UNITS:
        if abs(size) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """`20GB` is decimal, `20GiB` and `20G` binary, a bare number is bytes.

    >>> parse_bytes("20GB"), parse_bytes("1.5 GiB"), parse_bytes("4096")
    (20000000000, 1610612736, 4096)
    """
    number, unit = _split_number(text)
    factor = _BYTE_FACTORS.get(unit.lower())
    if number is None or factor is None or number < 0:
        raise UsageError("cannot read a size", received=repr(text), expected="a number and a unit",
                         hint="for example `20GB`, `512MiB` or `4096`")  # fmt: skip
    return int(number * factor)


def format_duration(seconds: float | None) -> str:
    """Seconds for users.

    >>> format_duration(0.25), format_duration(75), format_duration(43200), format_duration(None)
    ('0.25 s', '1 min 15 s', '12 h', 'n/a')
    """
    if seconds is None or not -_LARGEST < seconds < _LARGEST:
        return "n/a"
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def parse_duration(text: str) -> float:
    """`90s`, `45m`, `12h`, `1h30m`, `2d`; a bare number is seconds; `HH:MM:SS` and `D-HH:MM:SS` as SLURM writes them.

    >>> parse_duration("12h"), parse_duration("1h30m"), parse_duration("1-00:00:00")
    (43200.0, 5400.0, 86400.0)
    """
    total = _clock_seconds(text.strip()) if ":" in text else _unit_seconds(text.strip().lower())
    if total is None:
        raise UsageError("cannot read a duration", received=repr(text), expected="a number and a unit",
                         hint="for example `12h`, `1h30m`, `90s` or `12:00:00`")  # fmt: skip
    return total


def parse_time_limit(limit: str | float | None) -> float | None:
    """A time limit as users give it, in seconds; an error if it is none.

    >>> parse_time_limit("12h"), parse_time_limit(90)
    (43200.0, 90.0)
    """
    if limit is None:
        return None
    seconds = parse_duration(limit) if isinstance(limit, str) else float(limit)
    if isinstance(limit, str) and seconds > 0 and limit.strip()[-1] in "0123456789." and ":" not in limit:
        raise UsageError(  # twelve seconds, where twelve hours were meant, end a training before it began
            "a time limit without a unit", received=repr(limit), expected="a number and a unit",
            hint=f"`{limit.strip()}h`, or `{limit.strip()}s` for seconds",
        )  # fmt: skip
    if not seconds > 0:
        raise UsageError(
            "a time limit of nothing", received=repr(limit), expected="more than 0 seconds", hint="`12h`"
        )
    return seconds


def format_share(used: float | None, limit: float | None) -> str:
    """A value with its limit and the percentage, as buoy always shows one.

    >>> format_share(12 * 2**30, 16 * 2**30), format_share(2**30, None)
    ('12.0 GiB of 16.0 GiB (75 %)', '1.0 GiB of n/a')
    """
    text = f"{format_bytes(used)} of {format_bytes(limit)}"
    return (
        f"{text} ({100 * used / limit:.0f} %)" if used is not None and limit and "n/a" not in text else text
    )


def _split_number(text: str) -> tuple[float | None, str]:
    digits = text.strip()
    end = 0
    while end < len(digits) and digits[end] in "0123456789.":
        end += 1
    try:
        return float(digits[:end]), digits[end:].strip()
    except ValueError:
        return None, ""


def _unit_seconds(text: str) -> float | None:
    try:
        return float(text) if float(text) >= 0 else None
    except ValueError:
        pass
    total, rest = 0.0, text.replace(" ", "")
    while rest:
        number, unit = _split_number(rest)
        letters = len(unit) - len(unit.lstrip("abcdefghijklmnopqrstuvwxyz"))
        factor = _SECONDS.get(unit[:letters])
        if number is None or factor is None:
            return None
        total += number * factor
        rest = unit[letters:]
    return total if text else None


def _clock_seconds(text: str) -> float | None:
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    try:
        numbers = [int(part) for part in parts]
        seconds = float(int(days) * 86400) if days else 0.0
    except ValueError:
        return None
    if len(parts) > 3 or any(number < 0 for number in numbers):
        return None
    while len(numbers) < 3:  # SLURM: MM:SS without days, HH:MM with them
        numbers = [*numbers, 0] if days else [0, *numbers]
    return seconds + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
