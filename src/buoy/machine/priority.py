"""A low priority for our own helper processes, so that the training never waits for them."""

from __future__ import annotations

import os


def step_back(nice: int) -> None:
    """Run only when others do not, as far as the kernel lets us; never fails.

    A process in a session of its own is weighed by the kernel as a group against the trainer's whole session, and
    then its nice value means nothing outside that group: the group has one of its own.
    """
    try:
        os.nice(nice)
    except OSError:
        pass
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
    except OSError:
        pass  # a kernel or container without such groups: the nice value above is what counts
