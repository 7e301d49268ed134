"""The terminal or the connection it belonged to went away."""

from __future__ import annotations

from buoy.verdict.causes.common import recent_signal, signal_sender, status_reading, was_notebook
from buoy.verdict.evidence import Evidence
from buoy.verdict.going_on import go_on
from buoy.verdict.model import Cause, Claim

SIGHUP = 1


def judge(evidence: Evidence) -> Cause | None:
    """Certain from the status; from its own dump of stacks when no status could be read, likely."""
    seen = recent_signal(evidence, "SIGHUP", 10.0)
    if evidence.status.signal == SIGHUP:
        grade, readings = "certain", [status_reading(evidence)]
    elif seen and not evidence.status.known and not (evidence.speaker and evidence.speaker.note):
        grade, readings = "likely", []
    else:
        return None
    if seen:
        readings.append(seen.reading)
    words = "jupyter lab" if was_notebook(evidence) else printable_command(evidence)
    return Cause(
        id="hangup",
        claim=Claim("Its terminal or connection was closed (SIGHUP)", grade, tuple(readings)),  # type: ignore[arg-type]
        actor=signal_sender(evidence, "SIGHUP"),
        next=(
            f"start it so that it outlives the terminal: `nohup {words} &`, or inside `tmux`",
            go_on(evidence),
        ),
        survivable=False,
    )


def printable_command(evidence: Evidence) -> str:
    """The command to paste, under `buoy run`."""
    from buoy.text import printable

    return f"buoy run -- {printable(evidence.command, 70)}"
