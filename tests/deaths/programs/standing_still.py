"""Takes steps, and then none: each way to stand still is a function here, and its name is the argument.

Some are blocked, some only slow; `without_steps` and `slow_import` have not even taken a first step.
"""

import os
import socket
import subprocess
import sys
import threading
import time

import stage


def _compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def a_step():
    """After steps of 0.1 s of CPU time: one that never gets as much, however long it is looked at."""
    _compute(60)


def long_work():
    """After steps that take hardly any CPU time: work that takes a minute of it."""
    _compute(60)


def two_locks():
    """Two threads, each with the lock that the other one wants."""
    first, second = threading.Lock(), threading.Lock()

    def take(one, other):
        one.acquire()
        time.sleep(0.2)
        other.acquire()

    threading.Thread(target=take, args=(first, second)).start()
    take(second, first)


def empty_pipe():
    """Reads what nobody will write."""
    reading, _ = os.pipe()
    os.read(reading, 1)


def stuck_child():
    """Waits for a child that reads what nobody will write."""
    subprocess.run([sys.executable, "-c", "import os; ends = os.pipe(); os.read(ends[0], 1)"])


def sleeping_owner():
    """Waits for a lock whose owner sleeps: it may yet be freed."""
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (time.sleep(600), lock.release()), daemon=True).start()
    lock.acquire()


def _connection():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]


def silent_peer():
    """Waits for a peer that may yet speak."""
    client, _peer = _connection()
    client.recv(1)


def slow_socket():
    """Receives 200 kB a second."""
    client, peer = _connection()

    def send():
        while True:
            peer.sendall(bytes(20_000))
            time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()
    while True:
        client.recv(1 << 16)


def slow_save():
    """Writes a checkpoint to a target that takes 1 kB a second."""
    target = os.path.join(stage.FOLDER, "model.pt")
    os.mkfifo(target)
    code = "import sys, time; file = open(sys.argv[1], 'rb', 0)\nwhile file.read(100): time.sleep(0.1)"
    subprocess.Popen([sys.executable, "-c", code, target])
    with open(target, "wb", 0) as file:
        file.write(bytes(10 << 20))


def without_steps():
    """Waits for a file, as something that counts no steps does."""
    while not stage.said("never"):
        time.sleep(0.1)


def slow_import():
    """Imports a module that takes its time."""
    with open(os.path.join(stage.FOLDER, "heavy.py"), "w") as file:
        file.write("import time; time.sleep(600)\n")
    sys.path.insert(0, stage.FOLDER)
    import heavy  # noqa: F401


how = sys.argv[1]
if how == "a_step":
    stage.steps(5, work=lambda: _compute(0.1))
elif how not in ("without_steps", "slow_import"):
    stage.steps()
stage.ready()
globals()[how]()
