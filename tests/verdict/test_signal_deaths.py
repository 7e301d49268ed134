"""Deaths by a signal: what the status proves, what stack dumps add, what neither can say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from folders import CHILD, DIED_T, GIB, PID, Attempt, exited, note

STACK = 'Current thread 0x00007f (most recent call first):\n  File "/home/me/train.py", line 12 in forward\n'
SEGFAULT = "Fatal Python error: Segmentation fault\n\n" + STACK


def said(attempt: Attempt) -> tuple[str, str]:
    verdict = attempt.verdict()
    return verdict.cause.id, verdict.cause.claim.grade


def ends(attempt: Attempt, status: int | None) -> Attempt:
    attempt.death["status"] = {"raw": status, "source": "zombie" if status is not None else None}
    return attempt


def test_sigterm_is_certain_and_its_sender_unknown(attempt: Attempt) -> None:
    verdict = ends(attempt, 15).verdict()

    assert said(attempt) == ("terminated", "certain")
    assert verdict.cause.actor.grade == "possible"
    assert verdict.cause.survivable


def test_sigterm_through_buoy_run_has_a_sender_and_is_not_defied(attempt: Attempt) -> None:
    attempt.event("signal", before=0.1, signal="SIGTERM", from_pid=42)
    verdict = ends(attempt, 15).verdict()

    assert "pid 42" in verdict.cause.actor.text
    assert verdict.cause.actor.grade == "certain"
    assert not verdict.cause.survivable


def test_sigterm_then_sigkill_is_a_termination(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 10.0))
    verdict = attempt.verdict()

    assert said(attempt) == ("terminated", "certain")
    assert "10 s later" in verdict.cause.claim.text
    assert (verdict.where.line, verdict.where.seconds_before) == (12, 10.0)


def test_a_sigterm_from_minutes_ago_was_survived(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 300.0))

    assert said(attempt) == ("killed", "certain")


def test_a_sigterm_cannot_be_dated_when_the_clock_jumped(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 10.0))
    attempt.event("clock", before=100, jump=-3600.0)

    assert said(attempt) == ("killed", "certain")


def test_a_sigterm_file_younger_than_the_death_belongs_to_a_copy(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, -5000.0))

    assert said(attempt) == ("killed", "certain")


def test_an_ignored_sigterm_is_known_from_the_launcher(attempt: Attempt) -> None:
    attempt.event("signal", before=8.0, signal="SIGTERM", from_pid=42)

    assert said(attempt) == ("terminated", "certain")


def test_an_oom_kill_after_sigterm_stays_an_oom_kill(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 5.0))
    attempt.oom_killed()
    verdict = attempt.verdict()

    assert said(attempt) == ("kernel-oom", "certain")
    assert "SIGTERM" in verdict.cause.cascade[0].text


def test_an_orderly_exit_after_sigterm_is_likely_because_of_it(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"}, SIGTERM=(STACK, 2.0))

    assert said(ends(attempt, exited(0))) == ("terminated", "likely")


def test_exit_code_0_long_after_sigterm_is_a_clean_exit(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"}, SIGTERM=(STACK, 90.0))

    assert said(ends(attempt, exited(0))) == ("clean-exit", "certain")


def test_a_crash_after_a_survived_sigterm_is_a_crash(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 3.0), fault=(SEGFAULT, 0.0))

    assert said(ends(attempt, 11))[0] == "native-crash"


def test_without_a_status_the_dump_of_a_signal_makes_it_likely(attempt: Attempt) -> None:
    attempt.process(PID, SIGTERM=(STACK, 0.1))
    assert said(ends(attempt, None)) == ("terminated", "likely")

    attempt.process(PID, SIGHUP=(STACK, 0.1))
    assert said(attempt) == ("hangup", "likely")

    attempt.process(PID, SIGQUIT=(STACK, 0.1))
    assert said(attempt) == ("other-signal", "likely")


def test_hangup(attempt: Attempt) -> None:
    assert said(ends(attempt, 1)) == ("hangup", "certain")
    assert "nohup" in attempt.verdict().cause.next[0]


def test_interrupted(attempt: Attempt) -> None:
    attempt.process(PID, note("builtins.KeyboardInterrupt"))
    verdict = ends(attempt, 2).verdict()

    assert said(attempt) == ("interrupted", "certain")
    assert verdict.where.file == "/home/me/train.py"
    assert not verdict.cause.survivable


@pytest.mark.parametrize("number", [3, 10, 12, 13, 14, 24, 31, 40])
def test_other_signals_are_named(attempt: Attempt, number: int) -> None:
    assert said(ends(attempt, number)) == ("other-signal", "certain")
    assert f"signal {number} (" in attempt.verdict().cause.claim.text


@pytest.mark.parametrize("number", [4, 5, 6, 8, 11])
def test_a_crash_is_likely_since_kill_looks_alike(attempt: Attempt, number: int) -> None:
    attempt.process(PID, fault=(SEGFAULT, 0.0))
    verdict = ends(attempt, number | 0x80).verdict()

    assert said(attempt) == ("native-crash", "likely")
    assert verdict.mechanism.grade == "certain"
    assert (verdict.where.file, verdict.where.line) == ("/home/me/train.py", 12)
    assert verdict.where.seconds_before is None


def test_a_fault_that_the_kernel_logged_is_certain(attempt: Attempt) -> None:
    line = f"python3[{PID}]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6[7f+1]"
    attempt.death["kernel_log"]["lines"] = [{"t": DIED_T, "text": line}]

    assert said(ends(attempt, 11)) == ("native-crash", "certain")


@pytest.mark.parametrize(("number", "code"), [(11, 1), (11, 128), (8, 1), (4, 2)])
def test_a_fault_of_which_the_kernel_told_the_process_is_certain(
    attempt: Attempt, number: int, code: int
) -> None:
    attempt.process(PID, fatal=(number, code, 0), fault=(SEGFAULT, 0.0))
    assert said(ends(attempt, number)) == ("native-crash", "certain")
    assert attempt.verdict().cause.actor is None

    assert said(ends(attempt, None)) == ("native-crash", "likely")
    assert said(ends(attempt, 9)) == ("killed", "certain")  # it survived that one


def test_a_process_that_aborted_itself_is_certain(attempt: Attempt) -> None:
    attempt.process(PID, fatal=(6, -6, PID))

    assert said(ends(attempt, 6)) == ("native-crash", "certain")


@pytest.mark.parametrize("number", [4, 6, 7, 8, 11])
def test_a_signal_that_another_process_sent_is_no_crash(attempt: Attempt, number: int) -> None:
    attempt.process(PID, fatal=(number, 0, 4711), fault=(SEGFAULT, 0.0))
    verdict = ends(attempt, number).verdict()
    assert said(attempt) == ("other-signal", "certain")
    assert "sent by pid 4711" in verdict.cause.actor.text and verdict.cause.actor.grade == "certain"

    if number == 11:  # as its stack says
        assert said(ends(attempt, None)) == ("other-signal", "likely")
    attempt.process(PID, fatal=(number, 0, 0))
    assert "outside of its container" in ends(attempt, number).verdict().cause.actor.text


def test_a_crash_that_a_library_handled_and_raised_again_stays_likely(attempt: Attempt) -> None:
    attempt.process(PID, fatal=(11, -6, PID), fault=(SEGFAULT, 0.0))

    assert said(ends(attempt, 11)) == ("native-crash", "likely")


def test_another_process_that_faulted_proves_nothing(attempt: Attempt) -> None:
    line = "python3[77]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6[7f+1]"
    attempt.death["kernel_log"]["lines"] = [{"t": DIED_T, "text": line}]

    assert said(ends(attempt, 11)) == ("native-crash", "likely")


def test_a_stack_of_one_place_over_and_over_is_a_stack_overflow(attempt: Attempt) -> None:
    deep = SEGFAULT + '  File "/home/me/train.py", line 13 in f\n' * 98 + "  ...\n"
    attempt.process(PID, fault=(deep, 0.0))

    assert "calls itself" in ends(attempt, 11).verdict().cause.claim.text


def test_a_crash_without_status_is_known_from_its_last_word(attempt: Attempt) -> None:
    attempt.process(PID, fault=(SEGFAULT, 0.0))

    assert said(ends(attempt, None)) == ("native-crash", "likely")


def test_a_crash_at_shutdown_says_so(attempt: Attempt) -> None:
    attempt.process(PID, {"kind": "exit"}, fault=(SEGFAULT, 0.0))

    assert "shutting down" in ends(attempt, 11).verdict().cause.claim.text


def test_a_bus_error_with_full_shared_memory(attempt: Attempt) -> None:
    attempt.samples[-3]["shm_free"] = 4096

    assert said(ends(attempt, 7)) == ("shm-full", "likely")


def test_a_bus_error_on_a_full_disk(attempt: Attempt) -> None:
    attempt.death["disks"]["run"]["free"] = 0

    assert said(ends(attempt, 7)) == ("disk-full", "likely")


def test_a_bus_error_with_room_everywhere(attempt: Attempt) -> None:
    assert said(ends(attempt, 7)) == ("bus-error", "likely")


def test_the_hard_cpu_limit(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 59.6, "soft_limit": 60, "hard_limit": 60}

    assert said(attempt) == ("cpu-limit", "certain")


def test_the_soft_cpu_limit(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 60.1, "soft_limit": 60, "hard_limit": 90}

    assert said(ends(attempt, 24)) == ("cpu-limit", "certain")


@pytest.mark.parametrize(
    ("exact", "cause"),
    [(48.0, ("cpu-limit", "likely")), (35.0, ("killed", "likely")), (9.0, ("killed", "certain"))],
)
def test_a_process_that_the_hard_cpu_limit_may_have_killed_was_killed_by_nobody_for_certain(
    attempt: Attempt, exact: float, cause: tuple[str, str]
) -> None:
    """As a real kernel does it: killed at a limit of 60 s with 48 s used by the exact count."""
    attempt.death["cpu"] = {"used": exact, "soft_limit": 60, "hard_limit": 60, "soft_before": 60}
    attempt.exit = {"pid": PID, "t": DIED_T, "status": 9, "rusage": {"utime": exact, "stime": 0.0}}

    assert said(ends(attempt, 9)) == cause


def test_a_soft_cpu_limit_that_rose_by_a_second_was_reached(attempt: Attempt) -> None:
    """The kernel raises it when it sends SIGXCPU; it counts whole ticks, and is ahead of what a process used."""
    attempt.death["cpu"] = {"used": 1.7, "soft_limit": 3, "hard_limit": None, "soft_before": 2}
    attempt.exit = {"pid": PID, "t": DIED_T, "status": 24, "rusage": {"utime": 1.6, "stime": 0.1}}
    assert said(ends(attempt, 24)) == ("cpu-limit", "certain")
    assert "its limit of 2 s of CPU time" in attempt.verdict().cause.claim.text

    attempt.death["cpu"]["soft_before"] = 3  # it was read too late for that
    assert said(attempt) == ("cpu-limit", "likely")


def test_sigxcpu_far_below_the_limit_was_sent_by_somebody(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 3.0, "soft_limit": 60, "hard_limit": 90}

    assert said(ends(attempt, 24)) == ("other-signal", "certain")


def test_the_cpu_time_of_children_is_not_held_against_the_limit(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 3.0, "soft_limit": 60, "hard_limit": 60}
    attempt.exit = {"t": DIED_T, "pid": PID, "status": 9, "rusage": {"utime": 60.0, "stime": 1.0}}

    assert said(attempt) == ("killed", "certain")


def test_a_kill_shortly_before_the_cpu_limit_may_be_the_limit(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 59.0, "soft_limit": 60, "hard_limit": 60}
    assert said(attempt) == ("cpu-limit", "likely")

    attempt.exit = {"t": DIED_T, "pid": PID, "status": 9, "rusage": {"utime": 59.0, "stime": 0.1}}
    assert said(attempt) == ("cpu-limit", "likely")


def test_the_soft_cpu_limit_is_known_after_the_kernel_has_raised_it(attempt: Attempt) -> None:
    attempt.death["cpu"] = {"used": 59.9, "soft_limit": 61, "hard_limit": 90}

    assert said(ends(attempt, 24)) == ("cpu-limit", "likely")


def test_a_kill_at_the_time_limit_is_likely_the_limit(attempt: Attempt) -> None:
    attempt.attempt.update(time_limit=610.0, time_limit_source="given")

    assert said(attempt) == ("time-limit", "likely")


def test_the_session_may_have_begun_before_the_attempt(attempt: Attempt) -> None:
    attempt.attempt.update(time_limit=43200.0, session_started=attempt.attempt["wall"] - 42600.0)

    assert said(attempt) == ("time-limit", "likely")


def test_what_a_scheduler_killed_half_a_minute_after_it_asked_was_at_its_limit(attempt: Attempt) -> None:
    attempt.attempt.update(time_limit=570.0, time_limit_source="given")
    attempt.process(PID, SIGTERM=("Current thread\n", 30.0))

    assert said(attempt) == ("time-limit", "likely")


@pytest.mark.parametrize("limit", [60.0, 551.0, 590.0, 43200.0])
def test_a_limit_far_away_or_passed_is_no_reason(attempt: Attempt, limit: float) -> None:
    attempt.attempt["time_limit"] = limit

    assert said(attempt)[0] == "killed"


def test_an_oom_kill_at_the_time_limit_stays_an_oom_kill(attempt: Attempt) -> None:
    attempt.attempt["time_limit"] = 610.0
    attempt.oom_killed()

    assert said(attempt) == ("kernel-oom", "certain")


def test_sigxfsz_alone_is_likely(attempt: Attempt) -> None:
    assert said(ends(attempt, 25)) == ("file-size-limit", "likely")


@pytest.mark.parametrize(
    ("state", "is_certain", "words"),
    [
        ("blocked", True, "it had hung since step 120, for 1 min 40 s"),
        ("blocked", False, "it had hung since step 120, for 1 min 40 s"),
        ("starved", True, "it had been starved of CPU: no step since step 120, for 1 min 40 s"),
        ("network", True, "it had waited for the network: no step since step 120, for 1 min 40 s"),
    ],
)
def test_a_kill_while_it_stood_still_stays_a_kill_and_says_so(
    attempt: Attempt, state: str, is_certain: bool, words: str
) -> None:
    attempt.event("hang", before=60, step=120, age=40.0, state=state, is_certain=is_certain, phase="train")
    verdict = attempt.verdict()

    assert said(attempt) == ("killed", "certain")
    assert verdict.cause.cascade[0].text == words
    assert verdict.cause.cascade[0].grade == ("certain" if is_certain else "likely")


@pytest.mark.parametrize(
    ("waits", "grade"), [(None, "certain"), ("waits for the other end of a pipe", "likely")]
)
def test_what_may_have_waited_for_something_else_was_not_surely_short_of_cpu(
    attempt: Attempt, waits: str | None, grade: str
) -> None:
    attempt.event("hang", before=60, step=120, age=40.0, state="starved", is_certain=False, waits=waits)
    cascade = attempt.verdict().cause.cascade

    assert cascade[0].text.startswith("it had been short of CPU while it computed: no step since step 120")
    assert cascade[0].grade == grade


def test_a_kill_before_the_first_step_was_no_hang(attempt: Attempt) -> None:
    attempt.event("hang", before=60, step=0, age=40.0, state="sleep", is_certain=False, is_quiet=True)

    assert attempt.verdict().cause.cascade == ()


def test_a_hang_that_was_over_is_not_mentioned(attempt: Attempt) -> None:
    attempt.event("hang", before=60, step=120, age=40.0)
    attempt.event("hang-over", before=30, step=121)

    assert attempt.verdict().cause.cascade == ()


def test_thrashing_before_a_kill_is_a_possibility(attempt: Attempt) -> None:
    attempt.event("warning", before=20, alarm="thrashing", text="steps take 8x as long", values={})

    assert attempt.verdict().cause.cascade[0].grade == "possible"


def test_an_exception_note_does_not_explain_a_signal(attempt: Attempt) -> None:
    """It was caught, or belongs to an earlier life: the signal ended it."""
    attempt.process(PID, {**note("builtins.MemoryError"), "exited": False})
    verdict = attempt.verdict()

    assert said(attempt) == ("killed", "certain")
    assert verdict.cause.cascade[0].grade == "possible"


def test_a_damaged_status_is_unknown(attempt: Attempt) -> None:
    ends(attempt, 70000)

    assert said(attempt) == ("unknown", "possible")


def test_the_parents_word_beats_the_sidecars(attempt: Attempt) -> None:
    attempt.exit = {"t": DIED_T, "pid": PID, "status": 15}

    assert said(attempt)[0] == "terminated"


def test_a_record_of_another_process_is_not_ours(attempt: Attempt) -> None:
    attempt.exit = {"t": DIED_T, "pid": 77, "status": exited(0)}

    assert said(attempt) == ("killed", "certain")


def test_memory_holders_are_shown_for_a_kill(attempt: Attempt) -> None:
    assert attempt.verdict().holders[0].bytes == GIB


def test_a_crash_without_a_recorded_stack_points_to_the_scripts_own_faulthandler(attempt: Attempt) -> None:
    ends(attempt, 11)

    assert "on stderr if your script enabled faulthandler" in attempt.verdict().cause.next[0]


def test_a_command_with_a_path_can_be_pasted(tmp_path: Path) -> None:
    """A notebook called `my notebook (1)`, as a browser names a second download."""
    attempt = Attempt(tmp_path / "my notebook (1)")
    attempt.process(PID, fault=(SEGFAULT, 0.0))
    step = next(step for step in ends(attempt, 11).verdict().cause.next if "`cat " in step)
    command = step.partition("`")[2].rpartition("`")[0]

    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=10)
    assert shown.stdout == SEGFAULT


def test_a_crash_that_a_shell_passed_on_is_told_with_its_line_and_stack(attempt: Attempt) -> None:
    """What `bash -c 'python train.py; exit $?'` ran is the training: it has no workers to advise about."""
    attempt.attempt["command"] = ["bash", "-c", "python train.py; exit $?"]
    shutil.rmtree(attempt.folder / f"process-{PID}")
    attempt.process(CHILD, fault=(SEGFAULT, 0.0))
    ends(attempt, exited(139))
    silent = attempt.verdict()  # nobody saw the child die
    attempt.child_death(11, before=0.0, name="python train.py", instrumented=True)
    verdict = attempt.verdict()

    assert (silent.cause.id, silent.cause.claim.grade) == ("worker-killed", "likely")
    assert said(attempt) == ("worker-killed", "certain")
    for each in (silent, verdict):
        assert f"process-{CHILD}/fault.txt`" in each.cause.next[0]
        assert "num_workers" not in " ".join(each.cause.next)
        assert (each.where.file, each.where.line) == ("/home/me/train.py", 12)
    assert any("train.py:12" in reading.text for reading in verdict.cause.claim.evidence)
    assert "died just before the end" in verdict.cause.cascade[0].text


def test_what_timeout_ended_is_advised_about_its_time(attempt: Attempt) -> None:
    attempt.attempt["command"] = ["timeout", "-k", "5", "10m", "python", "train.py"]
    shutil.rmtree(attempt.folder / f"process-{PID}")
    attempt.process(CHILD)
    cause = ends(attempt, exited(124)).verdict().cause

    assert (cause.id, cause.claim.grade) == ("exit-code", "likely")
    assert "timeout 10m" in cause.claim.text
    assert "give `timeout` more than 10 min" in cause.next[0]
    assert "--time-limit 600s" in cause.next[1]
    assert len(cause.next) == 2  # nothing saves, so there is nothing to resume from

    attempt.event("save", 5.0, what="torch", path="/home/me/ck/step-100.pt", step=100)
    assert "resume from step 100" in attempt.verdict().cause.next[2]

    cause = ends(attempt, 9).verdict().cause
    assert (cause.id, cause.actor.grade) == ("killed", "likely")
    assert "timeout" in cause.actor.text

    attempt.attempt["command"][3] = "30m"  # its time was not over
    assert "timeout" not in ends(attempt, 9).verdict().cause.actor.text


def test_what_timeout_killed_after_its_time_is_advised_about_that(attempt: Attempt) -> None:
    """`timeout -k` sends SIGTERM, then SIGKILL, and passes 137 on."""
    attempt.attempt["command"] = ["timeout", "-k", "5", "9m", "python", "train.py"]
    shutil.rmtree(attempt.folder / f"process-{PID}")
    attempt.process(CHILD)
    attempt.child_death(9, before=0.0, name="python train.py", instrumented=True)
    cause = ends(attempt, exited(137)).verdict().cause

    assert cause.id == "worker-killed"
    assert "give `timeout` more than 9 min" in cause.next[0]


def test_a_function_of_another_cell_is_named_with_that_cells_number(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 11)
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        '  File "/tmp/ipykernel_7/111.py", line 11 in forward\n  File "/tmp/ipykernel_7/222.py", line 2 in <module>\n'
    )
    attempt.process(PID, fault=(stack, 0.0))
    (attempt.folder / f"process-{PID}" / "cells").write_text("3 111.py\n4 333.py\n5 222.py\n")
    verdict = attempt.verdict()

    assert verdict.where.file_cell == "In [3]"
    assert (
        "line 11 of In [3] in forward" in str(verdict)
        and "line 11 of In [3] in forward" in verdict._repr_html_()
    )
