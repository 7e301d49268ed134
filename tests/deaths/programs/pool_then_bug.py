"""A bug in the main process while pool workers wait; they are told to stop on the way out."""

import multiprocessing
import time

import stage

if __name__ == "__main__":
    pool = multiprocessing.get_context("fork").Pool(2)
    stage.ready()
    pool.apply_async(time.sleep, (30,))
    time.sleep(0.3)
    {}["no such column"]
