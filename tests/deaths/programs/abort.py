"""Aborts itself."""

import os

import stage

stage.ready()
os.abort()
