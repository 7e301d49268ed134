"""What the sidecar warns of: what runs out and when, leaks, stalls, slow-downs. Samples in, findings out."""
