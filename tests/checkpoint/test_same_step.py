"""A step that is saved again (at the end of an epoch, at the end of the run) is newer than what was saved of it."""

from __future__ import annotations

from pathlib import Path

from buoy.checkpoint.store import Store
from tests.checkpoint.ground import about, as_tensor, open_saver, state


def test_the_last_save_of_a_step_is_the_newest_even_where_an_earlier_name_was_freed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saver = open_saver(tmp_path)
    for seed in (1, 2):
        saver.save(state(seed), about(4), as_tensor, wait=True)
    store.remove(store.list()[1])  # the first one: its name is free again
    last = saver.save(state(3), about(4), as_tensor, wait=True)
    saver.close()
    newest = store.newest(print)

    assert newest is not None and newest.folder == last.folder
    assert [Path(entry.folder).name for entry in store.list()] == ["step-000000004.3", "step-000000004.2"]
