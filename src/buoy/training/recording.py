"""Where a run is recorded (in its own folder, or by the recorder that runs already, as a notebook's does), and what the
flight log learns of it: how long it will be, and a plan beside what came of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from buoy.errors import RunFolderError
from buoy.machine import disk, files
from buoy.machine.process import is_rehearsal
from buoy.text import printable
from buoy.units import format_bytes

if TYPE_CHECKING:
    from buoy.checkpoint.store import Store
    from buoy.estimate.result import Interval
    from buoy.flight.attempt import Attempt
    from buoy.flight.recorder import Recorder
    from buoy.planner.result import Answer, Plan


def record(store: Store, mirror: str | None, limit: float | None, say: Callable[[str], None]) -> Recorder:
    """Record this process for the run whose checkpoints are in this store; its log goes to the mirror too."""
    from buoy.flight import recorder
    from buoy.supervisor.watch import watch

    folder = store.folder
    make_folder(folder)
    there = recorder.current()
    if there is not None:  # a recording whose folder is gone, or that could not begin, is started again
        is_new = there.attempt is None
        there = watch(folder if is_new else None, mirror=mirror if is_new else None, time_limit=limit)
    attempt = there.attempt if there is not None else recorder.attempt_of_environment()
    newest = next((entry.folder for entry in store.list() if entry.complete), None)
    if attempt is None and there is not None:
        there.opened(folder, newest)
        return there
    if attempt is None:
        own = watch(folder, mirror=mirror, time_limit=limit)
        own.opened(folder, newest)
        return own
    joined = watch()
    joined.opened(folder, newest)
    if os.path.realpath(attempt.run_folder) != os.path.realpath(folder):
        recorded = printable(attempt.run_folder)
        say(f"checkpoints go to {printable(folder)}, the recording to {recorded}")
        if limit is not None:
            joined.event("time-limit", seconds=limit)
        _point(folder, attempt)
    if mirror is not None:
        _copy_too(attempt, mirror, folder, say)
    return joined


def refused(folder: str) -> None:
    """Another process trains this run: let `buoy run` know that this attempt is none."""
    from buoy.flight import recorder

    there = recorder.current()
    if there is not None:
        from buoy.supervisor.run import REFUSED

        there.event(REFUSED, run=folder)


def _point(folder: str, attempt: Attempt) -> None:
    from buoy.flight.attempt import point_to

    try:
        point_to(folder, attempt)
    except OSError:
        pass  # a folder that cannot be written is reported when the first checkpoint is made


def _copy_too(attempt: Attempt, mirror: str, folder: str, say: Callable[[str], None]) -> None:
    from buoy.flight.mirror import ask_for_copies

    try:
        ask_for_copies(attempt.folder, mirror, folder)
    except OSError as error:
        say(f"the recording is not copied to the mirror: {error.strerror}; the checkpoints are")


_WORTH_TELLING = 0.02


class Length:
    """Learns from each epoch that passed whole.

    >>> length = Length()
    >>> [length.epoch_begins(epoch, of=10, step=50 * epoch) for epoch in range(3)]
    [None, 500, None]
    """

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._told: int | None = None

    def epoch_begins(self, epoch: int, *, of: int | None, step: int, is_whole: bool = True) -> int | None:
        """The step that the training will end at, where that is news; `is_whole`: not resumed in its middle."""
        before, self._before = self._before, (epoch, step) if is_whole else None
        if before is None or epoch != before[0] + 1 or of is None or of <= epoch or step <= before[1]:
            return None
        end = step + (of - epoch) * (step - before[1])
        if self._told is not None and abs(end - self._told) <= _WORTH_TELLING * end:
            return None
        self._told = end
        return end


_FITS = "fits"  # as planner.model has it, which would load the whole estimate at the start of every run


def record_plan(plan: Plan | None, event: Callable[..., object]) -> None:
    """Write the plan down as one event; does nothing without a plan, and never raises."""
    if plan is None:
        return
    try:
        event(
            "plan",
            source=plan.source,
            framework="tensorflow" if "tensorflow" in plan.facts else "torch",
            batch=plan.batch,
            micro_batch=plan.micro_batch,
            fits=plan.fits,
            cheapest=plan.cheapest.title if plan.cheapest is not None else None,
            answers=[_answer(plan, answer) for answer in plan.answers],
        )
    except Exception:  # noqa: BLE001 - a note for the report is worth no training
        return


def compare(
    plan: Plan | None, event: Callable[..., object], say: Callable[[str], None], framework: str = "torch"
) -> None:
    """Say, and write down as one event, what the run really took on the GPU."""
    if plan is None or is_rehearsal():
        return
    try:
        # TensorFlow's allocator takes the whole card beforehand: there what was allocated in it counts.
        measure = "reserved" if framework == "torch" else "allocated"
        reading = import_module(f"buoy.{framework}.memory.device").read()
        foreseen = _foreseen(plan, reading, measure) if reading is not None else None
        if reading is None or foreseen is None:
            return
        (low, high), real = foreseen, int(reading[measure])
        event("peak", what=measure, foreseen=[low, high], real=real)
        say(
            f"the peak was {format_bytes(real)}; the plan foresaw {format_bytes(low)} to {format_bytes(high)}"
            + ("" if low <= real <= high else ": outside of it")
        )
    except Exception as error:  # noqa: BLE001 - a comparison never takes a training down
        say(f"the plan could not be compared with the run: {error}")


def _foreseen(plan: Plan, reading: dict[str, Any], measure: str) -> tuple[int, int] | None:
    """The foreseen peak of the framework's allocator; None where the plan says nothing about the device in use."""
    from buoy.estimate.devices import by_name

    used = by_name(str(reading["name"]), int(reading["total"]))
    answer = next((a for a in plan.answers if used is not None and a.target.device.id == used.id), None)
    if answer is None:
        return None
    if answer.memory_verdict == _FITS:
        found: Interval = getattr(answer.estimate, measure)
        return found.low, found.high
    peak, _ = _peak(plan, answer)
    if peak is None or measure != "reserved":
        return None
    least, most = answer.target.device.context
    return peak.low - least, peak.high - most


def _answer(plan: Plan, answer: Answer) -> dict[str, Any]:
    ram = next((need for need in answer.needs if need.name == "host RAM"), None)
    peak, samples = _peak(plan, answer)
    on_host = ram if answer.memory_verdict == _FITS or not answer.target.is_cpu else None
    return {
        "on": answer.target.id,
        "device": answer.target.device.id,
        "verdict": answer.verdict,
        "memory": answer.target.memory,
        "peak": [peak.low, peak.high] if peak is not None else None,
        "samples": samples,
        "host_ram": [on_host.low, on_host.high] if on_host is not None else None,
        "micro_batch": answer.micro_batch,
    }


def _peak(plan: Plan, answer: Answer) -> tuple[Interval | None, int | None]:
    """The peak of the training as the plan would have it run, and with how many samples at once that is."""
    if answer.memory_verdict == _FITS:
        return answer.peak, plan.batch
    split = next((remedy for remedy in plan.remedies if remedy.id == "micro-batch"), None)
    if split is None or plan.remedies_for != answer.target.id:
        return None, None  # as a whole it does not fit, so it will not run so
    return split.peak, answer.micro_batch


_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


def make_folder(folder: str) -> None:
    """Make the run's folder and see that it takes a file; `RunFolderError` if not, and then nothing is left behind."""
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        return  # it took some before; on a full disk an older one can give way to the next
    made: list[str] = []
    probe = os.path.join(folder, f"probe-{os.getpid()}")
    try:
        for path in reversed(disk.folders_to_make(folder)):
            _make(path, 0o777 if len(path) < len(folder) else 0o700, made)
        files.write_new(probe, bytes(_PROBE_BYTES))
        os.unlink(probe)
    except OSError as error:
        _take_back(probe, made)
        raise _refused(error, folder) from error


def _make(path: str, mode: int, made: list[str]) -> None:
    """Make it, unless another training that starts at this moment has just made it."""
    try:
        os.mkdir(path, mode)
        made.insert(0, path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _take_back(probe: str, made: list[str]) -> None:
    try:
        os.unlink(probe)
    except OSError:
        pass
    for path in made:
        try:
            os.rmdir(path)
        except OSError:
            continue  # it was not made, or somebody else uses it already


def _refused(error: OSError, path: str) -> RunFolderError:
    reason = error.strerror or str(error)
    if error.errno not in _FULL:
        return RunFolderError(
            "cannot write checkpoints",
            received=f"{path}: {reason}",
            expected="a folder that can be written",
            hint="give the Run another folder",
        )
    from buoy.supervisor.start import RESERVE_BYTES

    while not os.path.isdir(path):
        path = os.path.dirname(path)
    space = disk.space(path)
    free = f" ({format_bytes(space.free)} of {format_bytes(space.total)} free)" if space is not None else ""
    return RunFolderError(
        "cannot write checkpoints",
        received=f"{path}: {reason}{free}",
        expected=f"room for two checkpoints, and {format_bytes(RESERVE_BYTES)} for the recording",
        hint="free some space, or give the Run a folder on another disk",
    )
