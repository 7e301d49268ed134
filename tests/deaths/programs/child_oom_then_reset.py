"""Its child is killed for memory and that is dealt with; soon after an unrelated server hangs up on it."""

import os
import socket
import struct
import subprocess
import sys
import time

import stage

stage.ready()
child = subprocess.run([sys.executable, "-c", "held = [b'x' * (2 << 20) for _ in range(9999)]"])
if child.returncode != -9:
    os._exit(99)
time.sleep(1.0)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
peer.close()
client.recv(1)
