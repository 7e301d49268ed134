"""Trains well and then imports something that is not installed."""

import stage

stage.ready()
import a_plotting_library_nobody_installed  # noqa: E402, F401
