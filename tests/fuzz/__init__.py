"""Damaged, foreign and forged input for every verb that reads: `make fuzz N=5000`."""
