"""Free ports for tests that start servers in other processes."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return the number of a loopback port that was unused at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
