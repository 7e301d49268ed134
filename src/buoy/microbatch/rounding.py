"""How much of a difference between the gradients of whole and parts may be rounding: one rule for every framework.

Rounding is measured, by computing the whole again with every number moved by its last bit (`rounding.py` of each).
"""

from __future__ import annotations

EXAMPLES = 4
"""How often it is measured."""
TIMES = 6.0
"""Of the largest example: others are larger, and an array of one number may show next to none by chance."""
LARGE = 1e-2
"""Where more than this of a gradient is rounding, a comparison tells nothing: it is made elsewhere too."""
