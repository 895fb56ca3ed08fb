"""How new connections come in: a few at a time, so that a thousand who come back at once hold up nobody who is in."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterable

from taskqueue_server.context.connections import MAX_CONNECTIONS

__all__ = ["AT_ONCE", "have_room", "let_wait"]

AT_ONCE = 10
"""connections that are accepted in one turn of the loop, and tries where there are no descriptors: asyncio goes on
trying, and logs each try, as often as the backlog that it was told"""
_WAITING = 2048
"""connections that the kernel keeps until it is their turn"""
_DESCRIPTORS = MAX_CONNECTIONS + 2000


def let_wait(listeners: Iterable[socket.socket]) -> None:
    """Let many wait at listeners that were told the backlog `AT_ONCE`."""
    for listener in listeners:
        listener.listen(_WAITING)


def have_room() -> None:
    """Let this process have as many descriptors as it may serve sockets, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
