"""A multiprocessing child crashes; the main process sees its code and gives up."""

import ctypes
import multiprocessing

import stage  # the child imports this too, and joins the attempt


def work():
    ctypes.string_at(0)


if __name__ == "__main__":
    stage.ready()
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    raise RuntimeError(f"the worker ended with {child.exitcode}")
