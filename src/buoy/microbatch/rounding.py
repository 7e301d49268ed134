"""How much of a difference between the gradients of whole and parts may be rounding: one rule for every framework.

Rounding is measured, by computing the whole again with every number moved by its last bit (`rounding.py` of each).
Moves at random do not show it where thousands of equal numbers are added one after the other, as the gradient of a bias
behind a mean over all pixels is: each addition errs to the same side. So the loss is also taken times a number, and the
gradient divided by it: that is the same, whatever is computed, but for rounding, which is another one.
"""

from __future__ import annotations

EXAMPLES = 4
"""How often it is measured."""
STRETCHES = (0.83, 0.71, 0.59, 0.93)
"""What the loss is taken times, in each example. Below 1, as half precision may overflow; and no power of 2."""
TIMES = 6.0
"""Of the largest example: others are larger, and an array of one number may show next to none by chance."""
LARGE = 1e-2
"""Where more than this of a gradient is rounding, a comparison tells nothing: it is made elsewhere too."""
