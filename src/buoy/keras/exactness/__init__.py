"""Whether micro-batches give the whole batch's gradient: tried on a few samples."""
