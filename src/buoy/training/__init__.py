"""What a training loop holds: the run, its position, and the keeper of its checkpoints."""
