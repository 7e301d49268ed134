"""What a verdict is: claims about one death, each graded, each with the readings it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Grade = Literal["certain", "likely", "possible"]

SCHEMA = "buoy.verdict/1"


@dataclass(frozen=True, slots=True)
class Reading:
    """One piece of evidence: what was read, where, and when (wall clock; None when it has no time)."""

    text: str
    source: str
    wall: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement, how sure we are of it, and why."""

    text: str
    grade: Grade
    evidence: tuple[Reading, ...] = ()


def _claim(record: dict[str, Any]) -> Claim:
    if record["grade"] not in get_args(Grade):
        raise ValueError("no such grade")
    return Claim(**{**record, "evidence": tuple(Reading(**reading) for reading in record["evidence"])})


@dataclass(frozen=True, slots=True)
class Where:
    """Where the training was when it died; what is not known is None."""

    step: int | None = None
    epoch: int | None = None
    phase: str | None = None
    cell: str | None = None
    file: str | None = None
    file_cell: str | None = None
    """Where the file is a notebook's cell: which one, as `In [3]`. It may be another than the one that ran."""
    line: int | None = None
    function: str | None = None
    seconds_before: float | None = None
    """How long before the death this place was recorded; None when it is the place of the death itself."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why it died, as one file of `causes/` found it."""

    id: str
    """Stable kebab-case name: `kernel-oom`, `disk-full`, ..."""
    claim: Claim
    actor: Claim | None = None
    """Who did it, when something can be said."""
    cascade: tuple[Claim, ...] = ()
    """What died first, in order of time."""
    next: tuple[str, ...] = ()
    """What to do: commands that can be pasted or changes to make, the best first."""
    survivable: bool = False
    """Whether starting the same command again makes sense."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who held the memory at the end."""

    name: str
    bytes: int | None
    pid: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What killed one attempt."""

    run: str
    attempt: int
    mechanism: Claim
    cause: Cause
    where: Where
    holders: tuple[Holder, ...] = ()
    wall: float | None = None
    """When it died, or None when it is not known or it has not."""
    ran_for: float | None = None
    beside: str | None = None
    """Another attempt of the run that lived at the same time and may be the one that is meant."""
    schema: str = field(default=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values, for `--format json` and verdict.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any] | None) -> Verdict | None:
        """The verdict that `to_json` wrote; None where these values are not one."""
        if record is None or record.get("schema") != SCHEMA:
            return None
        try:
            cause = record["cause"]
            return cls(
                **{
                    **record,
                    "mechanism": _claim(record["mechanism"]),
                    "cause": Cause(
                        **{
                            **cause,
                            "claim": _claim(cause["claim"]),
                            "actor": _claim(cause["actor"]) if cause["actor"] is not None else None,
                            "cascade": tuple(map(_claim, cause["cascade"])),
                            "next": tuple(cause["next"]),
                        }
                    ),
                    "where": Where(**record["where"]),
                    "holders": tuple(Holder(**holder) for holder in record["holders"]),
                }
            )
        except (KeyError, TypeError, ValueError):
            return None

    def __str__(self) -> str:
        # The one look upwards: print(verdict) in a notebook should just work.
        from buoy.view.verdict import render

        return render(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from buoy.view.cards import verdict_card  # the same look upwards, for a notebook's last line

        return verdict_card(self.to_json())
