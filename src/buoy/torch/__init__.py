"""PyTorch: the only code of buoy that touches it."""
