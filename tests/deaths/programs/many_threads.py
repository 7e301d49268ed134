"""Starts threads until the machine refuses one."""

import threading

import stage

stage.ready()
while True:
    threading.Thread(target=stage.wait, args=("never",), daemon=True).start()
