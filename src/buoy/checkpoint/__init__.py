"""Checkpoints: whole or not there at all, every byte verified, written by a process that outlives the trainer."""
