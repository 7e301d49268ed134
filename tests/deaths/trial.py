"""One trial: stage a death of a kind, let it be judged, score what was said."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

from tests.deaths.ground import Ground
from tests.deaths.judging import Score, judge_folder, mechanism_is_true, score, score_modes, written_verdict
from tests.deaths.kind import Kind
from tests.deaths.scene import Scene, StageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one trial."""

    kind: str
    seconds: float
    scores: dict[str, Score] = field(default_factory=dict)
    """By evidence mode; empty when the death could not be staged."""
    alive: Score | None = None
    """What was said while it hung."""
    delay: float | None = None
    """Seconds from the death to the verdict on disk, where both moments are known."""
    on_disk: bool = False
    """Whether the recorder itself wrote a verdict."""
    trouble: str | None = None
    """Why the death could not be staged, or what the recorder complained of."""
    folder: str | None = None
    """Where the recording is kept, with `--keep`."""


def run_trial(kind: Kind, keep: bool = False) -> Outcome:
    """Stage one death and score its verdict; never raises, and leaves nothing behind."""
    started = time.monotonic()
    try:
        with Ground(kind, keep) as ground:
            scene = Scene(kind, ground)
            try:
                return _play(kind, scene, started)
            except StageError as error:
                kept = str(ground.folder) if keep else None
                return Outcome(
                    kind.name, time.monotonic() - started, trouble=f"not staged: {error}", folder=kept
                )
            finally:
                scene.close()
    except Exception as error:
        return Outcome(kind.name, time.monotonic() - started, trouble=f"the suite failed: {error!r}")


def _play(kind: Kind, scene: Scene, started: float) -> Outcome:
    scene.start()
    kind.act(scene)
    scene.wait_end()
    folder = scene.attempt_folder()
    if not (folder / "death.json").exists() and _kernel_killed(scene.sidecar()):
        raise StageError("the kernel's OOM killer killed the recorder, too")
    written = written_verdict(folder)
    verdict = written or judge_folder(folder)
    if _code_is_its_own(kind, scene) and not mechanism_is_true(
        verdict, scene.process.returncode, kind.launch
    ):
        raise StageError(f"the mechanism is wrong though certain: {verdict['mechanism']['text']}")
    scores = score_modes(kind, folder, verdict)
    alive = score(scene.alive_verdict, kind.alive.full, kind.alive.at_least) if kind.alive else None
    return Outcome(
        kind.name,
        time.monotonic() - started,
        scores,
        alive,
        delay=scene.judged - scene.died if scene.judged and scene.died else None,
        on_disk=written is not None,
        trouble=_complaints(scene),
        folder=str(folder) if scene.ground.keep else None,
    )


def _kernel_killed(pid: int | None) -> bool:
    """As on a crowded machine, where a killed training's memory is not free at once and the next one is taken."""
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return pid is not None and f"Killed process {pid} " in log


def _code_is_its_own(kind: Kind, scene: Scene) -> bool:
    """Whether the code the campaign got is the main process's: not of a killed launcher, a server, a container."""
    if kind.below:
        return False
    return "pid-namespace" not in kind.needs and (kind.launch == "watch" or scene.process.returncode >= 0)


def _complaints(scene: Scene) -> str | None:
    try:
        text = (scene.attempt_folder() / "sidecar.log").read_text().strip()
    except OSError:
        return None
    return f"the recorder complained: {text[-300:]}" if text else None
