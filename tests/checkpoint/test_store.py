"""What is saved comes back whole, newest first, and nobody but the one writer writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from buoy.checkpoint import arena, lock
from buoy.checkpoint import saver as saver_module
from buoy.checkpoint.encoding import CannotSave
from buoy.checkpoint.store import Store, WriterBusy
from buoy.errors import BuoyError, RunFolderError
from tests.checkpoint.ground import (
    Array,
    about,
    as_tensor,
    contents,
    open_saver,
    pattern,
    save,
    state,
    trainer,
    writers,
)
from tests.processes import alive, open_descriptors, wait_until


def newest(folder: Path) -> dict[str, object]:
    found = Store(folder).newest(lambda text: pytest.fail(text))
    assert found is not None
    return contents(found)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    receipt = save(tmp_path, 7)

    assert newest(tmp_path) == state(7)
    assert receipt.committed and receipt.step == 7
    assert receipt.bytes == sum(file.stat().st_size for file in Path(receipt.folder).iterdir())
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["lock", "step-000000007"]


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    receipt = save(tmp_path, 3)
    data = (Path(receipt.folder) / "state.safetensors").read_bytes()

    read = dict(safetensors.deserialize(data))

    model = state(3)["model"]
    assert bytes(read["model/embed.weight"]["data"]) == bytes(model["embed.weight"].data)  # type: ignore[index]
    assert read["model/empty"]["shape"] == [0, 3] and read["model/scale"]["shape"] == []
    assert read["optimizer/state.0.m"]["dtype"] == "BF16"
    assert (int.from_bytes(data[:8], "little") + 8) % 4096 == 0


def test_the_highest_step_is_first_and_a_step_saved_again_is_before_its_elder(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 2, 10)

    listed = Store(tmp_path).list()

    names = [os.path.basename(entry.folder) for entry in listed]
    assert names == ["step-000000010.2", "step-000000010", "step-000000009", "step-000000002"]
    assert all(
        entry.complete and entry.about["reason"] == "user" and entry.bytes > 60_000 for entry in listed
    )


def test_a_save_returns_before_it_is_written_and_says_later_how_it_went(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    first = saver.save(state(1), about(1), as_tensor)
    done = saver.wait()
    second = saver.save(state(2), about(2), as_tensor)

    assert first.write_seconds is None and not first.committed
    assert done is not None and done.committed and done.folder == first.folder
    wait_until(lambda: not saver.busy(), "the second checkpoint")
    assert saver.last().step == second.step == 2  # type: ignore[union-attr]
    saver.close()


def test_changes_after_the_save_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    value = Array(b"before" * 100_000)
    saver.save({"w": value}, about(1), as_tensor)
    value.data[:] = b"after!" * 100_000
    saver.close()

    assert newest(tmp_path) == {"w": Array(b"before" * 100_000)}


def test_the_state_may_grow_shrink_and_be_empty(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    for step, size in enumerate((4000, 9_000_000, 400), start=1):
        assert saver.save(state(step, size), about(step), as_tensor, wait=True).error is None
        assert newest(tmp_path) == state(step, size)
    saver.save({}, about(9), as_tensor, wait=True)
    saver.close()

    assert newest(tmp_path) == {}


def test_size_is_known_before_anything_is_copied(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    predicted = saver.size(state(1), as_tensor)
    receipt = saver.save(state(1), about(1), as_tensor, wait=True)
    saver.close()

    assert abs(receipt.bytes - predicted) < 1024  # the manifest is guessed


def test_what_cannot_be_saved_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    with pytest.raises(CannotSave, match=r"hooks\[0\] is a function"):
        saver.size({"hooks": [print]}, as_tensor)
    with pytest.raises(CannotSave):
        saver.save({"hooks": [print]}, about(1), as_tensor)
    saver.close()

    assert os.listdir(tmp_path / "checkpoints") == ["lock"]


def test_names_are_only_names(tmp_path: Path) -> None:
    odd = {"../../outside": Array(b"1"), "/etc/x": Array(b"2"), "": Array(b"3"), "é" * 5000: Array(b"4"),
           "__metadata__": Array(b"5"), "\ud800": Array(b"6")}  # fmt: skip
    saver = open_saver(tmp_path / "run")
    saver.save({"..": odd, **odd}, about(1), as_tensor, wait=True)
    saver.close()

    assert newest(tmp_path / "run") == {"..": odd, **odd}
    assert os.listdir(tmp_path) == ["run"]


def test_without_room_for_the_arena_it_streams_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "memory_room", lambda: 1000)
    heard: list[str] = []
    saver = open_saver(tmp_path, heard)
    receipts = [saver.save(state(step), about(step), as_tensor) for step in (1, 2)]

    assert all(receipt.committed for receipt in receipts)
    assert newest(tmp_path) == state(2)
    assert len(heard) == 1 and "training waits while checkpoints are written" in heard[0]
    assert not writers(tmp_path)
    saver.close()


def test_a_session_too_small_for_a_second_copy_lives_and_saves_all_the_same(
    tmp_path: Path, make_session: Callable[[int], Path]
) -> None:
    """In a memory group of 160 MiB, with a state of 80 MiB: an arena would be its death."""
    session = make_session(160 << 20)
    code = """
heard = []
s = open_saver(sys.argv[1], heard)
big = {"weights": {str(n): Array(pattern(8 << 20, n)) for n in range(10)}}
s.size(big, as_tensor)
for step in (1, 2):
    receipt = s.save(big, about(step), as_tensor)
    assert receipt.committed, receipt
print(len(heard), heard[0])
"""
    small = trainer(
        code,
        str(tmp_path),
        preexec_fn=lambda: (session / "cgroup.procs").write_text(str(os.getpid())),
        stderr=subprocess.PIPE,
    )
    said, trouble = small.communicate(timeout=400)

    assert small.returncode == 0, trouble
    assert said.startswith("1 not enough memory for a copy of the state (80.0 MiB")
    assert newest(tmp_path) == {"weights": {str(n): Array(pattern(8 << 20, n)) for n in range(10)}}


# -- the one writer ---------------------------------------------------------------------------------------------


def test_a_trainer_killed_right_after_save_returned_has_lost_nothing(tmp_path: Path) -> None:
    for step in range(1, 6):
        code = "s = open_saver(sys.argv[1]); n = int(sys.argv[2]); s.save(state(n, 3_000_000), about(n), as_tensor)\n"
        killed = trainer(code + "os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path), str(step))

        assert killed.wait(400) == -signal.SIGKILL
        saver = open_saver(tmp_path)  # waits for the writer that is left
        saver.close()
        assert newest(tmp_path) == state(step, 3_000_000)


def test_the_writer_has_nothing_of_the_trainers_open_and_leaves_after_it(tmp_path: Path) -> None:
    code = """
s = open_saver(sys.argv[1]); s.save(state(1), about(1), as_tensor, wait=True)
print("saved", flush=True); sys.stdin.readline()
"""
    living = trainer(code, str(tmp_path), stdin=subprocess.PIPE)
    assert living.stdout is not None and living.stdout.readline() == "saved\n"
    (writer,) = writers(tmp_path)
    held = open_descriptors(writer)
    status = Path(f"/proc/{writer}/stat").read_text().rpartition(")")[2].split()

    assert os.readlink(f"/proc/{writer}/cwd") == "/"
    assert not [path for path in held if path.startswith("pipe:") or "/dev/pts" in path]
    assert int(status[3]) != os.getsid(living.pid), "a session of its own"
    assert int(status[1]) != living.pid, "nobody's child"
    living.kill()
    living.communicate(timeout=400)
    wait_until(lambda: not alive(writer), "the writer to leave")


def test_a_killed_writer_is_replaced_and_the_checkpoint_is_not_lost(tmp_path: Path) -> None:
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    for pid in writers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    receipt = saver.save(state(2, 9_000_000), about(2), as_tensor)
    for pid in writers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    done = saver.wait()
    saver.close()

    assert receipt.error is None and done is not None and done.committed
    assert newest(tmp_path) == state(2, 9_000_000)
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]


def test_a_writer_that_hangs_costs_one_checkpoint_and_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    monkeypatch.setattr(saver_module, "_LEAST_PATIENCE", 0.5)
    (writer,) = writers(tmp_path)
    os.kill(writer, signal.SIGSTOP)
    hanging = saver.save(state(2), about(2), as_tensor)
    skipped = saver.save(state(3), about(3), as_tensor)
    monkeypatch.undo()
    after = saver.save(state(4), about(4), as_tensor, wait=True)
    both = writers(tmp_path)
    os.kill(writer, signal.SIGCONT)
    wait_until(lambda: not alive(writer), "the writer that was given up to leave")
    saver.close()

    assert not hanging.committed and hanging.error is None
    assert f"process {writer}, stopped" in str(skipped.error) and "while saving step 2" in str(skipped.error)
    assert after.committed and len(both) == 2
    store = Store(tmp_path)
    assert [contents(store.open(entry)) for entry in store.list()] == [state(4), state(2), state(1)], (
        "what the first was given was never written over, and is committed in the end"
    )


def test_writers_that_all_hang_never_make_the_training_write_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_LEAST_PATIENCE", 0.2)
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    stopped: list[int] = []
    receipts = []
    for step in range(2, 8):
        for pid in set(writers(tmp_path)) - set(stopped):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        receipts.append(saver.save(state(step), about(step), as_tensor))
        if receipts[-1].error is None and len(stopped) == 1 and step > 3:
            wait_until(lambda: not saver.busy(), "the second writer")  # it has answered once, and hangs next
    monkeypatch.setattr(saver_module, "has_room", lambda size: False)
    without_memory = saver.save(state(9), about(9), as_tensor)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, stopped)), "the writers to be gone")
    monkeypatch.undo()
    again = saver.save(state(10), about(10), as_tensor, wait=True)
    saver.close()

    assert len(stopped) == 2, "with two that hang no third is started"
    assert receipts[-1].error is not None and "does not respond" in receipts[-1].error
    assert without_memory.error is not None
    assert again.committed and newest(tmp_path) == state(10)


def test_the_next_start_waits_for_a_writer_that_hangs_only_so_long_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
s = open_saver(sys.argv[1]); s.save(state(1), about(1), as_tensor, wait=True)
(pid,) = writers(sys.argv[1]); os.kill(pid, signal.SIGSTOP)
s.save(state(2), about(2), as_tensor); os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer(code, str(tmp_path)).communicate(timeout=400)
    (writer,) = writers(tmp_path)
    monkeypatch.setattr(lock, "_PATIENCE_STILL", 0.3)
    heard: list[str] = []
    with pytest.raises(WriterBusy) as refused:
        open_saver(tmp_path, heard)
    os.kill(writer, signal.SIGKILL)
    open_saver(tmp_path).close()

    assert f"process {writer}, stopped" in str(refused.value) and f"`kill -9 {writer}`" in str(refused.value)
    assert len(heard) == 1 and f"process {writer}" in heard[0]
    assert newest(tmp_path) == state(1)


def test_an_interrupted_save_does_not_mix_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = open_saver(tmp_path)
    saver.save(state(1), about(1), as_tensor, wait=True)
    (writer,) = writers(tmp_path)
    os.kill(writer, signal.SIGSTOP)
    monkeypatch.setattr(saver_module, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saver.save(state(2), about(2), as_tensor)
    monkeypatch.undo()
    os.kill(writer, signal.SIGCONT)

    assert saver.save(state(3), about(3), as_tensor, wait=True).committed
    saver.close()
    store = Store(tmp_path)
    assert [contents(store.open(entry)) for entry in store.list()] == [state(3), state(2), state(1)]


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_a_second_process_is_told_who_writes(tmp_path: Path) -> None:
    code = "s = open_saver(sys.argv[1]); print('open', flush=True); sys.stdin.readline()"
    holder = trainer(code, str(tmp_path), stdin=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"

    with pytest.raises(WriterBusy) as refused:
        open_saver(tmp_path)
    holder.communicate("", timeout=400)

    assert f"process {holder.pid} on {os.uname().nodename}, for" in str(refused.value)
    open_saver(tmp_path).close()  # the lock died with its holder


def test_whoever_meets_a_finished_run_open_in_a_notebook_is_not_told_to_kill_it(tmp_path: Path) -> None:
    code = """
import time
s = open_saver(sys.argv[1]); now = {**about(3), "time": time.time()}
for finished in (False, True):
    s.save(state(3 + finished), {**now, "step": 3 + finished, "finished": finished}, as_tensor, wait=True)
    print('saved', flush=True); sys.stdin.readline()
"""
    holder = trainer(code, str(tmp_path), "ipykernel_launcher", stdin=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    told = []
    for _ in range(2):
        assert holder.stdout.readline() == "saved\n"
        with pytest.raises(WriterBusy) as refused:
            open_saver(tmp_path)
        told.append(str(refused.value))
        holder.stdin.write("\n")
        holder.stdin.flush()
    holder.communicate(timeout=400)

    assert f"a notebook's kernel, process {holder.pid}" in told[0] and "it finished" not in told[0]
    assert "it finished this training, at step 4, and still has it open" in told[1]
    assert "call `run.finish()` there, or restart that kernel, or give" in told[1]
    assert not any("`kill" in words for words in told)


def test_a_forked_worker_that_outlives_the_trainer_does_not_hold_the_run(tmp_path: Path) -> None:
    code = """
import time
s = open_saver(sys.argv[1]); s.save(state(1), about(1), as_tensor)
if os.fork() == 0:
    sys.stdout.close(); os.close(1); time.sleep(60); os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    trainer(code, str(tmp_path), start_new_session=True).communicate(timeout=400)

    open_saver(tmp_path).close()

    assert newest(tmp_path) == state(1)


def test_a_newer_saver_of_the_same_process_takes_over(tmp_path: Path) -> None:
    first = open_saver(tmp_path)
    first.save(state(1), about(1), as_tensor)
    second = open_saver(tmp_path)

    assert second.save(state(2), about(2), as_tensor, wait=True).committed
    with pytest.raises(BuoyError, match="closed"):
        first.save(state(3), about(3), as_tensor)
    assert len(Store(tmp_path).list()) == 2
    second.close()


def test_what_dead_writers_left_half_way_is_taken_away(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / "checkpoints" / ".step-000000002.part-77"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")

    assert newest(tmp_path) == state(1)
    open_saver(tmp_path).close()
    assert not left.exists()


# -- trouble ----------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(make_disk: Callable[[str], Path]) -> None:
    disk = make_disk("1m")
    saver = open_saver(disk)
    assert saver.save(state(1), about(1), as_tensor, wait=True).committed
    failed = saver.save(state(2, 3_000_000), about(2), as_tensor, wait=True)
    again = saver.save(state(3), about(3), as_tensor, wait=True)
    saver.close()

    assert failed.error == "No space left on device" and failed.errno == 28 and not failed.committed
    assert again.committed
    assert [entry.step for entry in Store(disk).list()] == [3, 1]
    assert not [name for name in os.listdir(disk / "checkpoints") if name.startswith(".")]


def test_a_read_only_folder_is_said_in_words(make_disk: Callable[[str], Path]) -> None:
    disk = make_disk("1m")
    save(disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    with pytest.raises(RunFolderError, match="cannot write checkpoints"):
        open_saver(disk)
    assert newest(disk) == state(1)


def test_the_folder_taken_away_under_the_writer_is_an_error_in_the_receipt(tmp_path: Path) -> None:
    saver = open_saver(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    receipt = saver.save(state(1), about(1), as_tensor, wait=True)
    saver.close()

    assert receipt.error == "No such file or directory"


def test_the_last_good_checkpoint_cannot_be_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    store = Store(tmp_path)
    two, one = store.list()
    with (Path(one.folder) / "state.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(b"damage")

    with pytest.raises(BuoyError, match="the last good checkpoint"):
        store.remove(two)
    store.remove(one)

    assert [entry.step for entry in Store(tmp_path).list()] == [2]
    with pytest.raises(BuoyError):
        store.remove(two)
    assert newest(tmp_path) == state(2)


def test_the_manifest_is_plain_json_and_names_what_wrote_it(tmp_path: Path) -> None:
    receipt = save(tmp_path, 5)

    manifest = json.loads((Path(receipt.folder) / "manifest.json").read_text())

    assert manifest["schema"] == "buoy.checkpoint/1" and manifest["step"] == 5
    assert manifest["versions"]["python"] == sys.version.split()[0]
    assert set(manifest["files"]) == {"state.safetensors", "values.json"}
