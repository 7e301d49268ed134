"""What a training loop holds: the run, its position, and the manager of its checkpoints."""

from buoy.errors import need_linux

need_linux("`buoy.Run` and the guards need")
