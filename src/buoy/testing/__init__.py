"""Running out of memory on purpose: a test kit for anyone who trains. See docs/testing.md.

>>> from buoy.testing import byte_budget, every_allocation
"""

from __future__ import annotations

from buoy.testing.budget import byte_budget
from buoy.testing.every_allocation import Failure, every_allocation

__all__ = ["Failure", "byte_budget", "every_allocation"]
