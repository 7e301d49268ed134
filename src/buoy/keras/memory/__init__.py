"""How much memory the device has left, and what holds it."""
