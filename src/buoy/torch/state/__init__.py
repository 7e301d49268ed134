"""What a PyTorch training holds, on its way to a checkpoint and back."""
