"""Standing beside a live training: `buoy run`, `buoy.watch()` and the sidecar they share."""
