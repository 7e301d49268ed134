"""What a Keras training holds, on its way to a checkpoint and back."""
