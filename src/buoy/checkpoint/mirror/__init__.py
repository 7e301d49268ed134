"""A second place for a run's checkpoints and log: another disk, a mounted drive, a URL."""
