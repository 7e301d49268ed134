"""Deaths by SIGKILL and by memory: who may be accused, and how surely."""

from __future__ import annotations

import pytest
from folders import CHILD, DIED_T, GIB, PID, Attempt, counters, exited, note, oom_line

from buoy.verdict.judge import judge


def said(attempt: Attempt) -> tuple[str, str]:
    verdict = attempt.verdict()
    return verdict.cause.id, verdict.cause.claim.grade


def texts(attempt: Attempt) -> str:
    return " | ".join(reading.text for reading in attempt.verdict().cause.claim.evidence)


def holds_most(attempt: Attempt) -> None:
    for row in attempt.samples:
        row["rss"] = row["cgroup_used"] = int(1.9 * GIB)


def test_a_kernel_log_line_that_names_the_process_is_proof(attempt: Attempt) -> None:
    attempt.oom_killed()

    assert said(attempt) == ("kernel-oom", "certain")
    assert f"Killed process {PID}" in texts(attempt)


def test_the_verdict_names_limit_and_holders(attempt: Attempt) -> None:
    attempt.oom_killed()
    verdict = attempt.verdict()

    assert "2.0 GiB" in verdict.cause.claim.text
    assert verdict.holders[0].pid == PID
    assert verdict.holders[0].bytes == GIB
    assert (verdict.where.step, verdict.where.epoch) == (120, 2)


def test_pids_of_another_namespace_prove_nothing(attempt: Attempt) -> None:
    attempt.oom_killed(group=0, machine=1)
    attempt.attempt["initial_pid_namespace"] = False

    assert said(attempt) == ("killed", "likely")


def test_the_groups_counter_alone_makes_it_likely(attempt: Attempt) -> None:
    """Somebody's kill -9 just after a child that nobody saw was OOM-killed leaves the same readings."""
    attempt.oom_killed(named=False)
    holds_most(attempt)

    assert said(attempt) == ("kernel-oom", "likely")
    assert "3 -> 4" in texts(attempt)


def test_a_small_process_is_only_likely_the_one_that_was_counted(attempt: Attempt) -> None:
    """A child that lived too shortly to be seen may be the victim instead."""
    attempt.oom_killed(named=False)
    for row in attempt.samples:
        row["rss"] = GIB // 4
    assert said(attempt) == ("kernel-oom", "likely")

    attempt.attempt["t"] = DIED_T - 1.0  # nobody had time to see who else was there
    assert said(attempt) == ("kernel-oom", "possible")


@pytest.mark.parametrize("change", [{"foreign": [{"pid": 7, "name": "other", "rss": GIB}]}, {"foreign_age": 3.0},
                                    {"foreign": None}, {"limit": None}])  # fmt: skip
def test_the_largest_process_is_likely_the_victim_beside_a_foreign_one(
    attempt: Attempt, change: dict
) -> None:
    attempt.oom_killed(named=False)
    holds_most(attempt)
    attempt.death["cgroup"].update(change)

    assert said(attempt) == ("kernel-oom", "likely")


def test_a_small_process_beside_a_foreign_one_cannot_be_told(attempt: Attempt) -> None:
    """Somebody's kill -9 in the second in which a neighbour is OOM-killed."""
    attempt.oom_killed(named=False)
    attempt.death["cgroup"]["foreign"] = [{"pid": 7, "name": "other", "rss": GIB}]
    for row in attempt.samples:
        row["rss"] = GIB // 100

    assert said(attempt) == ("unknown", "possible")


def test_a_foreign_process_seen_long_ago_does_not_matter(attempt: Attempt) -> None:
    attempt.oom_killed(named=False)
    for row in attempt.samples:
        row["rss"] = GIB // 100
    attempt.death["cgroup"]["foreign_age"] = 3.0
    assert said(attempt) == ("unknown", "possible")

    attempt.death["cgroup"]["foreign_age"] = 500.0
    assert said(attempt) == ("kernel-oom", "likely")


def test_a_neighbours_oom_kill_in_the_log_clears_the_kernel(attempt: Attempt) -> None:
    attempt.oom_killed()
    holds_most(attempt)
    attempt.death["kernel_log"]["lines"] = [oom_line(77)]

    assert said(attempt) == ("killed", "certain")
    assert "pid 77" in texts(attempt)


def test_two_kills_and_one_name_are_not_all_accounted_for(attempt: Attempt) -> None:
    attempt.oom_killed(group=2, machine=2)
    holds_most(attempt)
    attempt.death["kernel_log"]["lines"] = [oom_line(77)]

    assert said(attempt)[0] == "kernel-oom"


def test_unchanged_counters_clear_the_kernel(attempt: Attempt) -> None:
    assert said(attempt) == ("killed", "certain")
    assert "unchanged at 7" in texts(attempt)


def test_unreadable_counters_clear_nobody(attempt: Attempt) -> None:
    attempt.death["counters"] = counters(None, None)

    assert said(attempt) == ("unknown", "possible")
    assert "could not be read" in attempt.verdict().cause.claim.text


def test_the_groups_counter_alone_makes_it_no_more_than_likely(attempt: Attempt) -> None:
    """The process may have been moved into another group, which nobody watched."""
    attempt.death["counters"] = counters((3, 3), None)

    assert said(attempt) == ("killed", "likely")


def test_a_kill_elsewhere_on_the_machine_is_likely_a_neighbours(attempt: Attempt) -> None:
    """Not certain: the process may have been moved into another group."""
    attempt.death["counters"] = counters((3, 3), (7, 8))

    assert said(attempt) == ("killed", "likely")


def test_a_kill_counted_above_the_own_group_cannot_be_told(attempt: Attempt) -> None:
    attempt.death["counters"] = counters((3, 3), (7, 8))
    attempt.death["counters"]["cgroup_parents"] = [{"path": "/sys/fs/cgroup", "before": 1, "after": 2}]

    assert said(attempt) == ("unknown", "possible")


def test_the_machines_counter_alone_makes_it_likely(attempt: Attempt) -> None:
    attempt.death["counters"] = counters(None, (7, 8))

    assert said(attempt) == ("kernel-oom", "likely")


def test_high_memory_without_a_counted_kill_is_no_oom(attempt: Attempt) -> None:
    holds_most(attempt)

    assert said(attempt) == ("killed", "certain")
    assert "no proof" in attempt.verdict().cause.claim.text


def test_a_child_that_was_oom_killed_earlier_is_not_counted_twice(attempt: Attempt) -> None:
    """The counter rose ten minutes ago, with a recorded death; today's kill -9 is somebody's."""
    attempt.child_death(9, before=300, counters=counters((3, 4), (7, 8)))
    attempt.death["counters"] = counters((3, 4), (7, 8))
    holds_most(attempt)

    assert said(attempt) == ("killed", "likely")


def test_a_kill_that_an_older_sample_had_counted_is_not_this_one(attempt: Attempt) -> None:
    """A child that lived too shortly to be recorded was OOM-killed half a minute before the kill -9."""
    attempt.death["counters"] = counters((3, 4), (7, 8))
    holds_most(attempt)
    attempt.samples = [{**attempt.samples[0], "t": DIED_T - 30 + n, "oom_kills": 4} for n in range(30)]
    attempt.death["last"] = 1.0

    assert said(attempt) == ("killed", "likely")


def test_a_count_that_rose_while_the_process_was_vanishing_is_still_this_one(attempt: Attempt) -> None:
    attempt.oom_killed(named=False)
    holds_most(attempt)
    rows = [{**attempt.samples[0], "t": DIED_T - 10 + n, "oom_kills": 3} for n in range(9)]
    attempt.samples = [*rows, {**rows[0], "t": DIED_T - 0.2, "oom_kills": 4}]
    attempt.death["last"] = 0.2

    assert said(attempt) == ("kernel-oom", "likely")


def test_a_child_killed_in_the_same_moment_makes_it_a_possibility(attempt: Attempt) -> None:
    attempt.oom_killed(named=False)
    holds_most(attempt)
    attempt.child_death(9, before=0.2)

    assert said(attempt) == ("kernel-oom", "possible")


def test_a_group_that_is_killed_whole_needs_no_other_proof(attempt: Attempt) -> None:
    attempt.oom_killed(named=False)
    attempt.death["cgroup"]["group_kill"] = True

    assert said(attempt) == ("kernel-oom", "certain")


def test_without_a_status_a_counted_kill_is_likely(attempt: Attempt) -> None:
    attempt.death["status"] = {"raw": None, "source": None}
    attempt.oom_killed(named=False)
    holds_most(attempt)

    assert said(attempt) == ("kernel-oom", "likely")


def test_without_a_status_the_kernel_log_is_still_proof(attempt: Attempt) -> None:
    attempt.death["status"] = {"raw": None, "source": None}
    attempt.oom_killed()

    assert said(attempt) == ("kernel-oom", "certain")


def test_a_signal_from_the_parents_mouth_beats_a_log_line_of_a_reused_pid(attempt: Attempt) -> None:
    attempt.oom_killed()
    attempt.exit = {"schema": "buoy.exit/1", "t": DIED_T, "wall": 0.0, "pid": PID, "status": exited(0)}

    assert said(attempt) == ("clean-exit", "certain")


def test_colabs_own_note_is_shown(attempt: Attempt) -> None:
    attempt.oom_killed(named=False)
    attempt.death["colab_events"] = {"readable": True, "lines": ["1790000600,2,oom_kill=1"]}

    assert "oom_kill=1" in texts(attempt)


WORKER = "DataLoader worker (pid(s) {}) exited unexpectedly"


def test_an_oom_killed_worker_named_by_torch_is_certain(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))
    attempt.child_death(9, kernel_log=[oom_line(CHILD)], counters=counters((3, 4), (7, 8)))
    verdict = attempt.verdict()

    assert said(attempt) == ("worker-killed", "certain")
    assert "OOM killer" in verdict.cause.claim.text
    assert str(CHILD) in verdict.cause.cascade[0].text


def test_a_worker_killed_by_hand_is_not_called_oom(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))
    attempt.child_death(9)

    assert said(attempt) == ("worker-killed", "certain")
    assert "not by the kernel" in attempt.verdict().cause.claim.text


def test_a_worker_of_unknown_end_is_likely_at_most(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))
    attempt.child_death(None, counters=counters((3, 4), (7, 8)))

    assert said(attempt) == ("worker-killed", "likely")


def test_torchs_words_alone_accuse_nobody(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))

    assert said(attempt) == ("worker-killed", "likely")
    told = attempt.verdict().cause
    assert "exit code 0, or ended too soon to be watched" in told.claim.text
    assert "killed" not in told.claim.text
    assert "os._exit" in told.next[0]
    assert attempt.verdict().cause.actor is None


def test_a_worker_stopped_with_sigterm_at_shutdown_is_no_cause(attempt: Attempt) -> None:
    attempt.raises("builtins.ValueError", "bad label")
    attempt.child_death(15, before=0.1)

    assert said(attempt) == ("python-exception", "certain")


def test_an_oom_killed_child_that_was_dealt_with_is_no_cause(attempt: Attempt) -> None:
    attempt.raises("builtins.KeyError", "'label'")
    attempt.child_death(9, before=1.0, kernel_log=[oom_line(CHILD)])

    assert said(attempt) == ("python-exception", "certain")


def test_a_child_killed_minutes_before_a_clean_exit_is_no_cause(attempt: Attempt) -> None:
    attempt.death["status"]["raw"] = exited(0)
    attempt.child_death(9, before=200, kernel_log=[oom_line(CHILD)])

    assert said(attempt) == ("clean-exit", "certain")


def test_an_oom_killed_worker_that_nobody_followed_is_known_from_the_kernel_log(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))
    attempt.death["counters"] = counters((3, 4), (7, 8))
    attempt.death["kernel_log"]["lines"] = [oom_line(CHILD)]
    assert said(attempt) == ("worker-killed", "certain")

    attempt.death["kernel_log"]["lines"] = []
    assert said(attempt) == ("worker-killed", "likely")


def test_the_oom_kill_of_another_process_does_not_explain_a_lost_worker(attempt: Attempt) -> None:
    attempt.raises("builtins.RuntimeError", WORKER.format(CHILD), ("builtins.RuntimeError",))
    attempt.death["counters"] = counters((3, 3), (7, 8))
    attempt.death["kernel_log"]["lines"] = [oom_line(77)]

    assert said(attempt) == ("worker-killed", "likely")
    assert "OOM" not in attempt.verdict().cause.claim.text


def shell(attempt: Attempt, code: int) -> None:
    """The watched process is a shell, which is not instrumented."""
    attempt.attempt["command"] = ["bash", "-c", "python train.py; exit $?"]
    attempt.death["status"]["raw"] = exited(code)
    folder = attempt.folder / f"process-{PID}"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_a_shell_passes_on_the_oom_kill_of_its_command(attempt: Attempt) -> None:
    shell(attempt, 137)
    attempt.child_death(9, name="python train.py", kernel_log=[oom_line(CHILD)])

    assert said(attempt) == ("worker-killed", "certain")
    assert "`bash` passed that on" in attempt.verdict().cause.claim.text


def test_what_a_shell_ran_is_the_training_and_is_advised_as_such(attempt: Attempt) -> None:
    """No worker died: the batch counts, and the Python that held the memory is in the list."""
    shell(attempt, 137)
    attempt.process(CHILD)
    attempt.child_death(
        9, name="python train.py", kernel_log=[oom_line(CHILD)], instrumented=True, rss=2 * GIB
    )
    attempt.death["processes"] = [{"pid": PID, "name": "bash train.sh", "role": "main", "rss": 3 << 20}]
    verdict = attempt.verdict()
    words = " ".join(verdict.cause.next)

    assert "halve it" in words
    assert "changes little" not in words
    assert "num_workers" not in words
    assert (verdict.holders[0].pid, verdict.holders[0].bytes) == (CHILD, 2 * GIB)


def test_a_neighbour_whose_size_is_not_known_is_no_holder(attempt: Attempt) -> None:
    attempt.oom_killed()
    attempt.death["cgroup"]["foreign"] = [{"pid": 9, "name": None, "role": None, "rss": None}]

    assert [holder.pid for holder in attempt.verdict().holders] == [PID]


def test_a_shells_137_without_a_recorded_death_is_likely_at_most(attempt: Attempt) -> None:
    shell(attempt, 137)

    assert said(attempt) == ("exit-code", "likely")


def test_a_shells_137_beside_a_counted_kill_is_likely_that_kill(attempt: Attempt) -> None:
    shell(attempt, 137)
    attempt.death["counters"] = counters((3, 4), (7, 8))
    assert said(attempt) == ("worker-killed", "likely")

    attempt.death["kernel_log"]["lines"] = [oom_line(77)]
    assert said(attempt) == ("worker-killed", "likely")

    attempt.death["counters"] = counters((3, 3), (7, 8))  # that kill was somebody else's
    assert said(attempt) == ("exit-code", "likely")


def test_a_shell_passes_on_the_exception_of_its_command(attempt: Attempt) -> None:
    shell(attempt, 1)
    attempt.process(CHILD, note("builtins.KeyError", "'label'"))
    attempt.child_death(exited(1), name="python train.py", instrumented=True)
    verdict = attempt.verdict()

    assert said(attempt) == ("python-exception", "certain")
    assert verdict.where.file == "/home/me/train.py"
    assert "passed its end on" in verdict.cause.cascade[0].text


def test_a_shells_command_that_nobody_followed_is_known_by_its_last_words(attempt: Attempt) -> None:
    shell(attempt, 1)
    attempt.process(CHILD, note("builtins.KeyError", "'label'"))
    assert said(attempt) == ("python-exception", "likely")

    attempt.death["status"]["raw"] = exited(3)  # `; exit 3`: the shell went on to something else
    assert said(attempt) == ("exit-code", "certain")

    attempt.death["status"]["raw"] = exited(139)
    attempt.process(CHILD, fault=("Fatal Python error: Segmentation fault\n", 0.0))
    assert said(attempt) == ("worker-killed", "likely")

    attempt.death["status"]["raw"] = exited(137)
    attempt.process(CHILD)
    assert said(attempt) == ("worker-killed", "likely")
    assert "not by the kernel" in attempt.verdict().cause.claim.text

    # It had ended in order: the shell chose its code for another reason.
    attempt.process(CHILD, {"kind": "exit"})
    assert said(attempt) == ("exit-code", "likely")


def test_a_shells_second_command_is_known_by_its_last_words(attempt: Attempt) -> None:
    """`python prepare.py; python train.py`, both too short to be followed."""
    shell(attempt, 1)
    attempt.process(CHILD - 1, {"kind": "exit"})
    attempt.process(CHILD, note("builtins.KeyError", "'label'"))
    assert said(attempt) == ("python-exception", "likely")

    attempt.process(CHILD - 1, note("builtins.ValueError", "x"))  # which of the two it was cannot be told
    assert said(attempt)[0] == "exit-code"


def test_the_note_of_another_process_of_the_tree_says_nothing(attempt: Attempt) -> None:
    attempt.process(CHILD, note("builtins.MemoryError"))
    attempt.child_death(exited(1), before=100, instrumented=True)

    assert said(attempt) == ("killed", "certain")


def test_a_launcher_that_reports_a_failed_child_points_to_the_childs_exception(attempt: Attempt) -> None:
    attempt.raises(
        "subprocess.CalledProcessError", "Command '['python', 'train.py']' returned non-zero exit status 1."
    )
    attempt.process(CHILD, note("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."))
    attempt.child_death(exited(1), instrumented=True)

    assert said(attempt) == ("gpu-oom", "certain")


def test_reduced_modes_take_the_certainty_with_the_evidence(attempt: Attempt) -> None:
    attempt.death["status"]["source"] = "pidfd"
    attempt.oom_killed()
    evidence = attempt.evidence()
    answers = {
        mode: judge(evidence.without(mode)).cause for mode in ("no-kernel-log", "old-kernel", "notes-only")
    }

    assert (answers["no-kernel-log"].id, answers["no-kernel-log"].claim.grade) == ("kernel-oom", "likely")
    assert (answers["old-kernel"].id, answers["old-kernel"].claim.grade) == ("kernel-oom", "certain")
    assert answers["notes-only"].id == "recorder-lost"


def test_a_sample_that_came_too_early_is_told_with_its_age(attempt: Attempt) -> None:
    """One great allocation between two samples: the kernel's own line says more than the last sample."""
    attempt.oom_killed()
    attempt.death["kernel_log"]["lines"][0]["text"] = oom_line(PID)["text"].replace("61184kB", "1900000kB")
    attempt.death["processes"][0]["rss"] = GIB // 8
    attempt.death["cgroup"]["used"] = None
    for row in attempt.samples:
        row["cgroup_used"] = GIB // 8
    assert "memory last seen: 128.0 MiB of 2.0 GiB (6 %), 0.1 s before the end" in texts(attempt)

    attempt.death["cgroup"]["limit"] = None
    for row in attempt.samples:
        row["cgroup_limit"] = None
    assert said(attempt)[0] == "kernel-oom" and "last seen" not in texts(attempt)


def test_buoys_own_process_in_the_memory_group_is_called_that(attempt: Attempt) -> None:
    writer = {"pid": 7, "name": "python writer.py", "role": "buoy's own", "rss": 10 << 20}
    other = {"pid": 8, "name": "python serve.py", "role": None, "rss": 10 << 20}
    attempt.death["cgroup"]["foreign"] = [writer, other]

    told = {holder.pid: holder.detail for holder in attempt.verdict().holders}
    assert (told[7], told[8]) == ("buoy's own", "not part of this run")
