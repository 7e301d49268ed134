"""`buoy demo` (cli/demo.py): `training.py` is the program that dies in a small session and, guarded, does not."""
