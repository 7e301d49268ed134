"""One training step recorded without its memory: fake tensors, built without weights, in a child process."""
