"""Opens files and never closes one."""

import resource

import stage

stage.ready()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
while True:
    held.append(open(__file__))  # noqa: SIM115
