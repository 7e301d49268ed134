"""`buoy demo`: a training that dies in a small session, and the same one guarded.

story.py    what is shown, in order
session.py  a session made small for real
task.py     the data and the model of both trainings
plain.py    the training as everybody writes it
guarded.py  the same with buoy: three lines changed
"""
