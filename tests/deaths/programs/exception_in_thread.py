"""The data thread dies of an exception; the main thread waits for its data for ever."""

import queue
import threading

import stage


def feed():
    raise ValueError("row 17 is broken")


stage.steps()
stage.ready()
threading.Thread(target=feed).start()
queue.Queue().get()
