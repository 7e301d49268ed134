"""An exception that nobody caught."""

from __future__ import annotations

from buoy.text import printable
from buoy.verdict.causes.common import advice_about, died_before, raised, violent_deaths, weaker
from buoy.verdict.evidence import Evidence
from buoy.verdict.exceptions import is_failed_write, is_in_a_worker
from buoy.verdict.lost_child import broken_line
from buoy.verdict.model import Cause, Claim, Reading
from buoy.verdict.values import count, mapping, text

_HINTS = {
    "ModuleNotFoundError": "`pip install` the missing module, in the same environment that runs the script",
    "ImportError": "the module is there but does not offer that name: check its version",
    "SyntaxError": "fix the line; `python -m py_compile FILE` checks it without running",
    "RecursionError": "end the recursion; raising `sys.setrecursionlimit` risks a crash instead",
    "FileNotFoundError": "check the path and the working directory",
    "BrokenPipeError": "what read its output was gone (`| head`, a pager that was closed, a connection that ended): "
    "write to a file instead, or let the reader read to the end",
    "CalledProcessError": "the command that it ran failed: read that command's own last lines",
    "PermissionError": "check the owner and mode of that file, or write elsewhere",
    "KeyError": "print the keys that are there just before that line",
    "AssertionError": "the condition in that line did not hold: print both sides before it",
}


def judge(evidence: Evidence) -> Cause | None:
    """Certain: its own last words and exit code 1."""
    found = raised(evidence)
    if found is None or found.finding.id == "terminated":
        return None
    name = found.finding.type.rpartition(".")[2]
    place = mapping((evidence.speaker.exception or {}).get("where")) if evidence.speaker else {}
    where = ""
    if text(place.get("file")):
        where = f" at {printable(str(place['file']), 70)}:{count(place.get('line')) or '?'}"
    cascade = [*found.cascade]
    for child in evidence.child_deaths:
        if child.status.exit_code and died_before(evidence, child, 10.0) is not None:
            reading = Reading(str(child.status), child.source, child.wall)
            who = printable(child.name, 50)
            cascade.append(Claim(f"{who} (pid {child.pid}) had ended: {child.status}", "certain", (reading,)))
    violent, grade = violent_deaths(evidence), found.grade
    line = broken_line((evidence.speaker.exception if evidence.speaker else None) or {})
    if line == "to a child" or (line and violent):  # what broke it is not known, and not the line that raised
        grade = weaker(grade, "likely")
    hint = _HINTS.get(name, "fix that line; the traceback on stderr shows how it got there")
    if name == "FileNotFoundError" and str(evidence.attempt.get("platform")).startswith("colab"):
        hint += "; a new session starts with an empty `/content`"
    if is_in_a_worker(found.finding):
        hint = "run once with `num_workers=0`: the worker's own error then shows where it happens"
    if line == "to a child":
        hint = "the process at the other end of that pipe was gone, or silent: look for what it printed last"
    if is_failed_write(found.finding.message):
        hint = (
            "`torch.save` could not write all of it, and does not say why: see with `df -h` whether the disk that it "
            "writes to is full; if not, fix that line"
        )
    return Cause(
        id="python-exception",
        claim=Claim(f"An exception that nobody caught: {printable(found.finding.short, 130)}", grade,
                    (Reading(f"raised{where}", found.evidence[0].source), *found.evidence[1:])),
        cascade=tuple(cascade[:3]),
        next=(*advice_about(violent), hint),
    )  # fmt: skip
