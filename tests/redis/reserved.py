"""Reserving ports for redis-servers, so that parallel test runs do not use the same port."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# The cluster bus port of a node is 10,000 above its own port. Both are below 32,768, where Linux starts to use ports
# for outgoing connections, so that a server can be restarted on the same port.
_BLOCK = range(20_000, 22_700)
_BUS = 10_000


class PortHold:
    """A reserved port and its bus port, which no other test run uses before `release`.

    The reservation is a file lock, which ends with this process, so that nothing is left after a crash.
    """

    def __init__(self, port: int, descriptor: int) -> None:
        self.port = port
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the port. Calling it again has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def reserve() -> PortHold:
    """Reserve a free port whose bus port is free too. Raises `RuntimeError` if there is none."""
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
        # redis-server sets the same option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
