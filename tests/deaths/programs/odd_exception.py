"""An exception that is hard to write down: no message can be had of it, or a huge one."""

import sys

import stage


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")


stage.ready()
if sys.argv[1] == "unprintable":
    raise Unprintable
raise ValueError("\udcff\x00 bad byte " + "x" * 5_000_000)
