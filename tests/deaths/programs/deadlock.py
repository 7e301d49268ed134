"""Takes a lock twice."""

import threading

import stage

stage.steps()
stage.ready()
lock = threading.Lock()
lock.acquire()
lock.acquire()
