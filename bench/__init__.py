"""buoy's own figures: each module prints a table and returns its rows; `python -m bench` runs them all."""
