"""Ports for redis-server children, each held by one test run."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# The bus port of a cluster's node is 10,000 above its own. Both stay below 32,768, where Linux
# begins to take ports for outgoing connections, so that a server can be restarted on its port.
_BLOCK = range(20_000, 22_700)
_BUS = 10_000


class PortHold:
    """A port and its bus port: free when this was made, and no other test run takes them before `release`.

    The lock on a file ends with this process, so nothing is left to clean up after a crash.
    """

    def __init__(self, port: int, descriptor: int) -> None:
        self.port = port
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Give it back. Doing so again has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def reserve() -> PortHold:
    """Hold a free port."""
    folder = Path(tempfile.gettempdir()) / f"taskqueue-test-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    start = random.SystemRandom().randrange(len(_BLOCK))
    for offset in range(len(_BLOCK)):
        port = _BLOCK[(start + offset) % len(_BLOCK)]
        descriptor = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        if _free(port) and _free(port + _BUS):
            return PortHold(port, descriptor)
        os.close(descriptor)
    raise RuntimeError("no port is free for a redis-server")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as redis-server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
