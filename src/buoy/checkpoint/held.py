"""Whether a lock file is held by some process: asked by those who only look."""

from __future__ import annotations

import errno
import os

from buoy.machine.files import open_regular


def is_held(path: str) -> bool | None:
    """Whether some process holds this lock file; None where that cannot be told."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        import fcntl
    except ImportError:
        os.close(descriptor)
        return None  # Windows
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(descriptor)
