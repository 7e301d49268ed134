"""Reads from a socket that has nothing yet: EAGAIN, as a refused fork gives, for quite another reason."""

import socket

import stage

ours, theirs = socket.socketpair()
ours.setblocking(False)
stage.ready()
ours.recv(1)
