"""The checkpoint to go on from: the newest good one, here or in the second home.

A search that finds only damaged ones ends in an error, not in a new beginning: whoever goes on with a run of ten hours
must not find it at step 0, and what is damaged may still be worth something to its owner.
"""

from __future__ import annotations

from collections.abc import Callable

from buoy.checkpoint.mirror import Mirror, MirrorFailed
from buoy.checkpoint.passed_over import NEWER, PassedOver, Unusable, in_words
from buoy.checkpoint.store import Checkpoint, Store
from buoy.errors import RunFolderError


def newest_good(
    store: Store,
    mirror: Mirror | None,
    say: Callable[[str], object],
    trouble: Callable[[str, str], object],
) -> Checkpoint | None:
    """The newest whose every byte is as written, brought back if it is there; None when there never was one."""
    passed = PassedOver(say)
    found = _search_here(store, passed)
    if mirror is not None:
        try:
            brought = mirror.search(passed, found.step if found is not None else None)
        except MirrorFailed as error:
            passed.close()
            if found is None:
                raise  # to begin anew beside checkpoints that could not be seen is nobody's wish
            trouble("mirror", f"{error.message} ({error.received}); going on from step {found.step} here")
            return found
        if brought is not None:
            say(f"step {brought} was brought back from the mirror {mirror.shown}{mirror.made_by}")
            found = _search_here(store, passed)
    passed.close()
    if found is None and passed.all:
        _begin_anew_or_refuse(passed.all, store, mirror, say)
    return found


def _search_here(store: Store, passed: PassedOver) -> Checkpoint | None:
    found = store.search(passed)
    for unusable in passed.all:
        store.remember_damage(unusable)
    return found


def _begin_anew_or_refuse(
    unusable: list[Unusable], store: Store, mirror: Mirror | None, say: Callable[[str], object]
) -> None:
    """Copies that never were whole are no checkpoints; one that was, and is damaged, is for its owner to decide on."""
    damaged = [one for one in unusable if one.was_whole]
    places = store.checkpoints if mirror is None else f"{store.checkpoints} and the mirror {mirror.shown}"
    if not damaged:
        say(f"nothing in the mirror was ever whole ({len(unusable)} begun): the training begins at step 0")
        return
    if any(one.fault == NEWER for one in damaged):
        raise RunFolderError(
            "no checkpoint of this run can be read by this buoy",
            received=in_words(damaged),
            expected="one of a format that it knows",
            hint="it was written by a newer buoy: install that one",
        )
    raise RunFolderError(
        f"no good checkpoint of this run is left ({len(damaged)} damaged)",
        received=in_words(damaged),
        expected="one whose every byte is as written, here or in the mirror",
        hint=f"the damaged ones are kept in {places}; bring a good one back (`buoy ckpt restore`), or begin anew "
        "at step 0 by naming another run folder",
    )
