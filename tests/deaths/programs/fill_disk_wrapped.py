"""A full file system, told only in the second line of a chained exception."""

import os
import sys

import stage


def save(folder):
    try:
        with open(os.path.join(folder, "checkpoint.bin"), "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)
    except OSError as error:
        raise RuntimeError("could not save the checkpoint") from error


stage.ready()
save(sys.argv[1])
