"""One process of a run: ``taskqueue``, which ends when its parent has gone, however that ended."""

from __future__ import annotations

import os
import runpy
import signal
import threading

_STDIN = 0


def _wait_for_parent() -> None:
    # Nobody writes: the read ends when the parent's end of the pipe is closed, by a SIGKILL too.
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()
    runpy.run_module("taskqueue_cli", run_name="__main__", alter_sys=True)
