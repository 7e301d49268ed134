"""The user's loader: its order, workers and random state, opened at any position."""
