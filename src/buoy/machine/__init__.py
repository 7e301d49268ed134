"""What the session has, and what it is using: read from the machine, or from dated platform data."""
