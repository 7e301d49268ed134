"""Is refused memory, makes do with less and ends well."""

import stage

stage.ready()
try:
    held = bytearray(1 << 60)
except MemoryError:
    held = bytearray(1 << 10)
