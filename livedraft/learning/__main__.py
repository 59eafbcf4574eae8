"""`python -m livedraft.learning`: the training process. It watches its parent before it imports anything large: at idle
priority that import takes as long as others want the cores, and a process whose parent is gone must not wait for it."""

from __future__ import annotations

import os
import sys
import threading


def end_with_parent() -> None:
    """Leave as soon as the pipe on standard input closes: its other end lives in the serving process."""

    def wait() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()

    from livedraft.learning.team import main

    main()
