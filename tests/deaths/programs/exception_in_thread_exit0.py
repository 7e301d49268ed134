"""A helper thread dies of an exception; the training does not need it and ends well."""

import threading

import stage


def tell():
    raise ValueError("the tracker is not reachable")


stage.ready()
helper = threading.Thread(target=tell)
helper.start()
helper.join()
