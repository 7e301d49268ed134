"""A training step as a transaction: micro-batches, retries, what is restored."""
