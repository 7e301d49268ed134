"""What `buoy plan` needs of Keras: a script run up to its first step."""
