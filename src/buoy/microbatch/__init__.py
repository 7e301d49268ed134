"""Micro-batches: what a batch is split into, how large the pieces are, and what counts as running out of memory."""
