"""How much memory the device has left."""
