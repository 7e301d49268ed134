"""The stage on which the programs of the death suite die: each imports it in its first line.

Launched plainly, that line is where `buoy.watch()` is called; under `buoy run` nothing of buoy is touched.
"""

import os
import time

FOLDER = os.environ.get("DEATHS_STAGE", ".")

if os.environ.get("DEATHS_WATCH"):
    import buoy

    buoy.watch(os.environ["DEATHS_WATCH"])


def say(word):
    """Leave a word (and our pid) for the campaign, whole or not at all."""
    path = os.path.join(FOLDER, word)
    with open(f"{path}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}.part", path)


def said(word):
    """Whether the campaign left this word."""
    return os.path.exists(os.path.join(FOLDER, word))


def wait(word):
    """Wait until the campaign leaves this word."""
    while not said(word):
        time.sleep(0.005)


def ready():
    """Say that the scene is set and wait for the campaign's cue."""
    say("ready")
    wait("go")


def steps(count=20, work=lambda: time.sleep(0.005)):
    """Take training steps the way an instrumented script does; inside `buoy run` this joins its attempt."""
    import buoy

    run = buoy.watch(os.environ.get("DEATHS_WATCH"))
    for _ in range(count):
        work()
        run.step()
