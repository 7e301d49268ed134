"""What `buoy plan` needs of PyTorch: a script run up to its first step, flops."""
