"""What `buoy plan` needs of PyTorch: a script run up to its first step, on a machine that need not have a GPU."""
