"""How much memory a training step takes, foreseen: a trace of the step, replayed through the allocator's model."""
