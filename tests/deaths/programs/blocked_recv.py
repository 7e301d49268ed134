"""Waits for a peer that never speaks."""

import socket

import stage

stage.steps()
ours, theirs = socket.socketpair()
stage.ready()
ours.recv(1)
