"""The answer of `buoy plan`: will it fit there, how many bytes, and the cheapest settings that make it fit."""
