"""A rank, worker or command that ended first: what its parent's exception says of it, and what nobody may conclude."""

from __future__ import annotations

import shutil
import time

import pytest
from folders import CHILD, DIED_T, PID, Attempt, counters, exited, note, oom_line

from buoy.verdict.exceptions import lost_child

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


RESET = ("builtins.ConnectionResetError", "[Errno 104] Connection reset by peer", ("builtins.OSError",))
IN_MULTIPROCESSING = {
    "file": "/usr/lib/python3.11/multiprocessing/connection.py",
    "line": 378,
    "function": "_recv",
}


def resets(attempt: Attempt, raised: float, **more: object) -> None:
    """A line broke so many seconds before the process had left."""
    attempt.raises(RESET[0], RESET[1], RESET[2], t=DIED_T - raised, **more)


def test_a_childs_death_is_as_old_as_it_was_when_the_exception_came(attempt: Attempt) -> None:
    """The parent took two minutes to leave."""
    resets(attempt, raised=120.0)
    attempt.child_death(9, before=121.0, kernel_log=[oom_line(CHILD)])
    verdict = attempt.verdict()

    assert said(attempt) == ("worker-killed", "likely")
    assert "was killed by the kernel's OOM killer" in claim(attempt)
    assert "1 s before the exception" in verdict.cause.cascade[0].text
    assert "line" not in verdict.cause.next[0]


def test_a_named_worker_is_meant_however_long_its_parent_took_to_leave(attempt: Attempt) -> None:
    words = f"DataLoader worker (pid {CHILD}) is killed by signal: Killed. "
    attempt.raises("builtins.RuntimeError", words, RUNTIME, t=DIED_T - 300.0)
    attempt.child_death(9, before=300.1)

    assert said(attempt) == ("worker-killed", "certain")


@pytest.mark.parametrize(("status", "words"), [(9, "SIGKILL"), (11, "signal 11 (SIGSEGV)")])
def test_a_pipe_that_is_read_late_broke_with_the_worker(attempt: Attempt, status: int, words: str) -> None:
    resets(attempt, raised=0.1, inner=IN_MULTIPROCESSING)
    attempt.child_death(status, before=3000.0)

    assert said(attempt) == ("worker-killed", "likely")
    assert words in claim(attempt)


def test_a_socket_that_breaks_long_after_a_child_is_told_with_that_child(attempt: Attempt) -> None:
    """It may have led anywhere: neither the line nor the child is blamed for certain."""
    resets(attempt, raised=0.1)
    attempt.child_death(9, before=3000.0, kernel_log=[oom_line(CHILD)])
    verdict = attempt.verdict()

    assert said(attempt) == ("python-exception", "likely")
    assert (
        f"(pid {CHILD}) was killed by the kernel's OOM killer 50 min before" in verdict.cause.cascade[0].text
    )
    assert f"first find out why pt_data_worker (pid {CHILD}) died" in verdict.cause.next[0]


def test_a_pipe_to_a_process_that_nobody_followed_is_no_certain_fault_of_the_line(attempt: Attempt) -> None:
    resets(attempt, raised=0.1, inner=IN_MULTIPROCESSING)
    assert said(attempt) == ("python-exception", "likely")
    assert "the process at the other end of that pipe was gone" in attempt.verdict().cause.next[0]

    attempt.death["counters"] = counters((3, 4), (7, 8))
    attempt.death["kernel_log"]["lines"] = [oom_line(CHILD)]
    assert said(attempt) == ("worker-killed", "likely")


def test_a_child_that_was_seen_dead_only_after_the_exception_may_have_died_before_it(
    attempt: Attempt,
) -> None:
    """A starved recorder notices late, and says since when it had not looked."""
    resets(attempt, raised=2.0)
    attempt.child_death(9, before=0.5, since=DIED_T - 3.0)
    assert said(attempt) == ("worker-killed", "likely")

    attempt.events[-1]["since"] = DIED_T - 1.0  # it lived then: the parent ended it on its way out
    assert said(attempt) == ("python-exception", "likely")


def test_a_worker_that_the_chain_of_an_exception_names_is_likely_meant(attempt: Attempt) -> None:
    inner = {
        "type": "builtins.RuntimeError",
        "message": f"DataLoader worker (pid {CHILD}) is killed by signal: Killed.",
    }
    attempt.raises("builtins.KeyError", "'batch'", chain=[inner])
    attempt.child_death(9)

    assert said(attempt) == ("worker-killed", "likely")


def test_no_violent_death_is_dropped_from_any_story(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'label'")
    for number in range(5):
        attempt.child_death(11, before=400.0 - number, pid=CHILD - number)
    attempt.child_death(15, before=1.0, pid=CHILD - 7)
    attempt.child_death(9, before=1.0, pid=CHILD - 8, role="buoy's own")
    story = " / ".join(item.text for item in attempt.verdict().cause.cascade)

    assert said(attempt) == ("python-exception", "certain")
    assert f"pid {CHILD - 4}" in story and f"pid {CHILD - 3}" in story
    assert "3 more child processes had died of signals before" in story
    assert f"pid {CHILD - 7}" not in story and f"pid {CHILD - 8}" not in story


def test_thousands_of_children_without_a_status_are_judged_in_time(attempt: Attempt) -> None:
    """An old kernel tells nobody how a collected child ended; one kill among them was counted."""
    attempt.raises("builtins.KeyError", "'label'")
    for number in range(8000):
        counted = counters((3, 3 + (number > 4000)), (7, 7 + (number > 4000)))
        attempt.child_death(None, before=500.0 - number / 20, pid=CHILD - number, counters=counted)
    begun = time.process_time()
    verdict = attempt.verdict()

    assert time.process_time() - begun < 20
    assert "OOM killer" in verdict.cause.cascade[0].text


def wrapped(attempt: Attempt, command: str, status: int) -> None:
    """A command that buoy cannot look into ended, and had started the training."""
    attempt.attempt["command"] = command.split()
    shutil.rmtree(attempt.folder / f"process-{PID}")
    attempt.death["status"]["raw"] = status


@pytest.mark.parametrize(
    ("command", "code"),
    [("make train", 2), ("setsid -w python train.py", 9), ("unshare -pf python train.py", 1)],
)
def test_a_wrapper_that_answers_with_a_code_of_its_own_is_told_with_its_commands_end(
    attempt: Attempt, command: str, code: int
) -> None:
    wrapped(attempt, command, exited(code))
    attempt.child_death(9, before=0.3, name="python train.py", kernel_log=[oom_line(CHILD)])

    assert said(attempt) == ("worker-killed", "likely")
    program = command.split()[0]
    assert f"OOM killer; `{program}`, which had started it, then ended with exit code {code}" in claim(
        attempt
    )
    assert "num_workers" not in " ".join(attempt.verdict().cause.next)


def test_a_code_long_after_a_childs_end_is_the_wrappers_own_with_that_end_in_its_story(
    attempt: Attempt,
) -> None:
    wrapped(attempt, "make all", exited(2))
    attempt.child_death(11, before=200.0)
    verdict = attempt.verdict()

    assert said(attempt) == ("exit-code", "certain")
    assert "was ended by signal 11 (SIGSEGV) 3 min 20 s before the end" in verdict.cause.cascade[0].text
    assert "first find out why" in verdict.cause.next[0]


@pytest.mark.parametrize("code", [247, 137, 1])
def test_a_python_launcher_passes_on_that_its_command_was_killed_for_memory(
    attempt: Attempt, code: int
) -> None:
    attempt.attempt["command"] = ["python", "launch.py"]
    attempt.process(PID, {"kind": "exit"})
    attempt.death["status"]["raw"] = exited(code)
    attempt.child_death(9, before=0.3, name="python train.py", kernel_log=[oom_line(CHILD)])

    assert said(attempt) == ("worker-killed", "likely")
    assert "`python launch.py`, which had started it" in claim(attempt)


def test_a_python_that_kills_its_own_child_and_leaves_with_a_code_chose_both(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"})
    attempt.death["status"]["raw"] = exited(3)
    attempt.child_death(9, before=0.3, name="tensorboard")

    assert said(attempt) == ("exit-code", "certain")


def test_a_wrapper_that_ends_itself_by_its_commands_signal_was_not_killed(attempt: Attempt) -> None:
    wrapped(attempt, "timeout 300 python train.py", 9)
    attempt.child_death(9, before=0.1, name="python train.py", kernel_log=[oom_line(CHILD)])
    assert said(attempt) == ("worker-killed", "likely")
    assert "OOM killer; `timeout` then ended itself by the same signal" in claim(attempt)

    attempt.attempt["command"] = ["bash", "train.sh"]  # a shell does no such thing: both were killed
    attempt.events[-1]["kernel_log"] = []
    assert said(attempt) == ("killed", "certain")
