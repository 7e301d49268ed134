"""Python itself is refused memory by RLIMIT_AS."""

import resource

import stage

stage.ready()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
held = bytearray(2 << 30)
