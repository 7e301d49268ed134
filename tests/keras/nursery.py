"""One TensorFlow start for many processes: `python -m tests.keras.nursery` forks one for each line on stdin.

A line is JSON: [the name of a module here, arguments of its `main`...]. Nothing of TensorFlow has run before the fork,
so the child is as good as a new process, five seconds earlier. The answer is the wait status and what it said.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import traceback

from tests.keras import behaviours, beside_behaviours, data_behaviours, session, short, training

MODULES = {
    "training": training.main,
    "behaviours": behaviours.main,
    "data_behaviours": data_behaviours.main,
    "beside_behaviours": beside_behaviours.main,
    "session": session.main,
    "short": short.main,
}


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if not child:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os._exit(live(json.loads(line)))
            _, status = os.waitpid(child, 0)
            said.seek(0)
            print(json.dumps({"status": status, "said": said.read()}), flush=True)


def live(request: list[object]) -> int:
    """A life in the child; returns its exit code."""
    module, *arguments = request
    status = 1
    try:
        MODULES[str(module)](*arguments)  # type: ignore[operator]
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
