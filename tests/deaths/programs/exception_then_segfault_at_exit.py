"""Ends in an exception and crashes while the interpreter is taken down, as native libraries do."""

import ctypes


class Late:
    def __del__(self):
        ctypes.string_at(0)


import stage  # noqa: E402

late = Late()
stage.ready()
raise ValueError("the line to fix")
