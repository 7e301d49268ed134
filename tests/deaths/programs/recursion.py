"""Recurses in Python until the interpreter says no."""

import stage


def down(depth):
    return down(depth + 1)


stage.ready()
down(0)
