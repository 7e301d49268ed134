"""The death suite: small real programs, killed for real, and what `buoy` must say of each.

`python -m tests.deaths --repeat 20` runs every kind 20 times in random order and prints what was right.
"""
