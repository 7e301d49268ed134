"""How results look: one renderer per format, over values that know nothing of it."""
