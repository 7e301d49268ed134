"""One TensorFlow start for many trainings: `python -m tests.keras.nursery` forks a process for each line on stdin.

A line is JSON: the arguments of `tests.keras.training.main`. Nothing of TensorFlow has run before the fork, so the
child is as good as a new process, five seconds earlier. The answer is the wait status and what it said on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from tests.keras import training


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if not child:
                os.dup2(said.fileno(), 2)
                os.dup2(said.fileno(), 1)
                status = 1
                try:
                    training.main(*json.loads(line))
                    status = 0
                except SystemExit as error:
                    status = int(error.code or 0)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    import atexit

                    atexit._run_exitfuncs()
                    sys.stderr.flush()
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            print(json.dumps({"status": status, "said": said.read()}), flush=True)


if __name__ == "__main__":
    main()
