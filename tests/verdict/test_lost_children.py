"""A rank, worker or command that ended first: what its parent's exception says of it, and what nobody may conclude."""

from __future__ import annotations

import pytest
from folders import CHILD, PID, Attempt, counters, exited, note, oom_line

from buoy.verdict.lost_child import lost_child

RUNTIME = ("builtins.RuntimeError",)
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException"
POOL = "concurrent.futures.process.BrokenProcessPool"
POOL_WORDS = "A process in the process pool was terminated abruptly while the future was running or pending."
SPAWN = "torch.multiprocessing.spawn.ProcessExitedException"
SIBLING = CHILD - 1
# As torch 2.13 wrote it; the recorder keeps the beginning and the end of a message that is longer.
REPORT = """
============================================================
rk.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-15_22:48:03
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: {sibling})  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PI ... -----------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_22:48:03
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: {pid}) {name}
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


def said(attempt: Attempt) -> tuple[str, str]:
    verdict = attempt.verdict()
    return verdict.cause.id, verdict.cause.claim.grade


def claim(attempt: Attempt) -> str:
    return attempt.verdict().cause.claim.text


def torchrun(attempt: Attempt, code: int, name: str = "") -> None:
    """torchrun reports that rank 1 failed; it had ended rank 0 itself."""
    attempt.attempt["command"] = ["torchrun", "--nproc-per-node", "2", "train.py"]
    attempt.raises(ELASTIC, REPORT.format(sibling=SIBLING, code=code, pid=CHILD, name=name))
    attempt.process(SIBLING)
    attempt.child_death(15, before=0.1, pid=SIBLING, name="python train.py")


def test_a_rank_that_leaves_with_a_code_is_named_with_it(attempt: Attempt) -> None:
    torchrun(attempt, 3)
    attempt.process(CHILD, {"kind": "exit"}, step=77)
    verdict = attempt.verdict()

    assert said(attempt) == ("exit-code", "certain")
    assert f"Rank 1 (pid {CHILD}) ended itself with exit code 3" in claim(attempt)
    assert verdict.where.step == 77
    assert verdict.where.file is None


def test_a_rank_that_was_killed_is_blamed_and_not_the_one_torchrun_ended_then(attempt: Attempt) -> None:
    torchrun(attempt, -9, " (SIGKILL)")
    attempt.child_death(9, before=0.6, name="python train.py")

    assert said(attempt) == ("worker-killed", "certain")
    assert f"rank 1 (pid {CHILD}) was killed with SIGKILL by someone" in claim(attempt)


def test_a_killed_rank_that_nobody_followed_is_known_from_torchruns_word(attempt: Attempt) -> None:
    torchrun(attempt, -9, " (SIGKILL)")
    assert said(attempt) == ("worker-killed", "certain")
    assert "not by the kernel" in claim(attempt)

    attempt.death["counters"] = counters(None, None)
    assert said(attempt) == ("worker-killed", "likely")


def test_an_exception_of_the_failed_rank_is_the_cause(attempt: Attempt) -> None:
    torchrun(attempt, 1)
    attempt.process(CHILD, note("builtins.ValueError", "bad label"))
    verdict = attempt.verdict()

    assert said(attempt) == ("python-exception", "certain")
    assert "bad label" in claim(attempt)
    assert verdict.where.file == "/home/me/train.py"


def test_an_exception_that_the_failed_rank_only_showed_is_not_the_cause(attempt: Attempt) -> None:
    torchrun(attempt, 3)
    attempt.process(CHILD, note("builtins.ValueError", "bad label", uncaught=False))

    assert said(attempt) == ("exit-code", "certain")


def test_a_report_without_its_root_cause_is_likely_at_most(attempt: Attempt) -> None:
    """The head of a cut message names only ranks that torchrun ended itself."""
    attempt.raises(ELASTIC, REPORT.format(sibling=SIBLING, code=3, pid=CHILD, name="").partition("Root")[0])

    assert said(attempt) == ("worker-killed", "likely")
    assert str(SIBLING) not in claim(attempt)


def test_torchrun_that_was_told_to_stop_is_terminated(attempt: Attempt) -> None:
    attempt.raises(SIGNALLED, "Process 3999999 got signal: 15")

    assert said(attempt) == ("terminated", "certain")


@pytest.mark.parametrize(
    ("kind", "message", "bases"),
    [
        (POOL, POOL_WORDS, RUNTIME),
        ("builtins.RuntimeError", f"DataLoader worker (pid {CHILD}) is killed by signal: Killed. ", RUNTIME),
        ("builtins.RuntimeError", f"DataLoader worker (pid(s) {CHILD}) exited unexpectedly", RUNTIME),
        ("joblib.externals.loky.process_executor.TerminatedWorkerError",
         "A worker process was unexpectedly terminated. The exit codes of the workers are {SIGKILL(-9)}", RUNTIME),
    ],
)  # fmt: skip
def test_words_about_a_lost_worker_never_blame_the_line_that_raised(
    attempt: Attempt, kind: str, message: str, bases: tuple[str, ...]
) -> None:
    attempt.raises(kind, message, bases)

    assert said(attempt) == ("worker-killed", "likely")
    assert "mend" not in attempt.verdict().cause.next[0]


def test_a_killed_pool_worker_that_was_followed_is_certain(attempt: Attempt) -> None:
    attempt.raises(POOL, POOL_WORDS, RUNTIME)
    attempt.child_death(9, before=0.1)
    attempt.child_death(15, before=0.05, pid=SIBLING)

    assert said(attempt) == ("worker-killed", "certain")
    assert str(CHILD) in claim(attempt)


def test_an_oom_killed_pool_worker_is_likely_the_one_that_was_counted(attempt: Attempt) -> None:
    attempt.raises(POOL, POOL_WORDS, RUNTIME)
    attempt.death["counters"] = counters((3, 4), (7, 8))
    attempt.death["kernel_log"]["lines"] = [oom_line(CHILD)]

    assert said(attempt) == ("worker-killed", "likely")
    assert "OOM killer" in claim(attempt)


def test_a_worker_that_left_with_a_code_was_not_killed(attempt: Attempt) -> None:
    attempt.raises(
        "builtins.RuntimeError", f"DataLoader worker (pid(s) {CHILD}) exited unexpectedly", RUNTIME
    )
    attempt.child_death(exited(5))

    assert said(attempt) == ("exit-code", "certain")
    assert f"DataLoader worker (pid {CHILD}) ended itself with exit code 5" in claim(attempt)


def test_a_named_worker_is_meant_and_no_other_that_died_then(attempt: Attempt) -> None:
    attempt.raises(
        "builtins.RuntimeError", f"DataLoader worker (pid(s) {CHILD}) exited unexpectedly", RUNTIME
    )
    attempt.child_death(9, pid=SIBLING, kernel_log=[oom_line(SIBLING)])

    assert said(attempt) == ("worker-killed", "likely")
    assert "OOM" not in claim(attempt)


def test_a_spawned_process_is_named_with_its_signal_or_code(attempt: Attempt) -> None:
    attempt.raises(SPAWN, "process 1 terminated with signal SIGSEGV")
    assert said(attempt) == ("worker-killed", "certain")
    assert "Process 1 died of signal 11 (SIGSEGV)" in claim(attempt)

    attempt.raises(SPAWN, "process 1 terminated with exit code 3")
    assert said(attempt) == ("exit-code", "certain")


def test_a_killed_process_of_unknown_pid_may_be_the_victim_that_the_log_names(attempt: Attempt) -> None:
    attempt.raises(SPAWN, "process 1 terminated with signal SIGKILL")
    assert said(attempt) == ("worker-killed", "certain")  # no kill was counted anywhere
    assert "not by the kernel" in claim(attempt)

    for group, grade in ((None, "likely"), ((3, 3), "likely"), ((3, 4), "likely")):
        attempt.death["counters"] = counters(group, (7, 8))
        attempt.death["kernel_log"]["lines"] = [oom_line(CHILD)]
        assert said(attempt) == ("worker-killed", grade)


def test_the_exception_of_a_worker_is_no_lost_worker(attempt: Attempt) -> None:
    attempt.raises(
        "builtins.ValueError", "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback"
    )

    assert said(attempt) == ("python-exception", "certain")


def test_a_subprocess_that_was_killed_is_told_by_its_signal(attempt: Attempt) -> None:
    attempt.raises(
        "subprocess.CalledProcessError", "Command '['python', 'x.py']' died with <Signals.SIGKILL: 9>."
    )
    assert said(attempt) == ("worker-killed", "certain")

    attempt.child_death(11)  # another death than the one that the exception speaks of
    assert "SIGKILL" in claim(attempt)


def test_a_training_that_a_command_of_its_own_ended_is_told_with_its_step(attempt: Attempt) -> None:
    """A launcher counts no steps; who does is the training, and the line is the one that ran the command."""
    words = "Command '['python', 'x.py']' died with <Signals.SIGKILL: 9>."
    attempt.raises("subprocess.CalledProcessError", words)
    where = attempt.verdict().where
    assert (where.step, where.epoch, where.file, where.line) == (120, 2, "/home/me/train.py", 31)

    attempt.process(PID, note("subprocess.CalledProcessError", words), step=0)
    where = attempt.verdict().where
    assert (where.step, where.file) == (120, None)  # of the last sample


def test_an_exception_in_a_command_keeps_the_step_of_the_training_that_ran_it(attempt: Attempt) -> None:
    attempt.raises(
        "subprocess.CalledProcessError", "Command 'python eval.py' returned non-zero exit status 1."
    )
    attempt.process(CHILD, note("builtins.KeyError", "'label'"), step=0)
    attempt.child_death(exited(1), instrumented=True)
    verdict = attempt.verdict()

    assert verdict.cause.id == "python-exception"
    assert verdict.where.step == 120


@pytest.mark.parametrize(("signal", "advised"), [(9, False), (15, False), (11, True)])
def test_a_worker_that_somebody_ended_has_no_error_to_be_shown(
    attempt: Attempt, signal: int, advised: bool
) -> None:
    name = {9: "Killed", 15: "Terminated", 11: "Segmentation fault"}[signal]
    attempt.raises(
        "builtins.RuntimeError", f"DataLoader worker (pid {CHILD}) is killed by signal: {name}.", RUNTIME
    )
    attempt.child_death(signal)

    assert said(attempt) == ("worker-killed", "certain")
    assert ("own error then shows" in attempt.verdict().cause.next[0]) is advised


def test_odd_reports_are_read_without_harm() -> None:
    """Whatever stands in a message: an answer, and no status that the words do not give."""
    for message in (
        "",
        "Root Cause",
        "Root Cause\n exitcode : -999 (pid: )",
        "Root Cause\n exitcode  : x (pid: 7)",
    ):
        found = lost_child({"type": ELASTIC, "message": message})
        assert found is not None
        assert not found.status.known
    for message in ("DataLoader worker (pid", "DataLoader worker (pid ²) is killed by signal: Nonsense."):
        found = lost_child({"type": "builtins.RuntimeError", "message": message, "chain": [1, {}]})
        assert found is not None
        assert not found.status.known
    assert lost_child({"type": 3, "message": None}) is None
    assert lost_child({}) is None


def test_a_clean_shell_says_that_its_command_was_killed_on_the_way(attempt: Attempt) -> None:
    attempt.attempt["command"] = ["sh", "-c", "python oom.py; echo done"]
    attempt.death["status"]["raw"] = exited(0)
    attempt.child_death(9, before=1.0, name="python oom.py", kernel_log=[oom_line(CHILD)])
    attempt.child_death(15, before=0.5, pid=SIBLING, name="pt_data_worker")
    verdict = attempt.verdict()

    assert said(attempt) == ("clean-exit", "certain")
    assert len(verdict.cause.cascade) == 1
    assert verdict.cause.cascade[0].grade == "certain"
    assert (
        f"python oom.py (pid {CHILD}) was killed by the kernel's OOM killer" in verdict.cause.cascade[0].text
    )


def test_a_child_killed_by_hand_is_not_called_oom_after_a_clean_exit(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"})
    attempt.death["status"]["raw"] = exited(0)
    attempt.child_death(9)

    assert "signal 9" in attempt.verdict().cause.cascade[0].text
    assert "OOM" not in attempt.verdict().cause.cascade[0].text
