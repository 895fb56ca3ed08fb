"""Notifications to systemd for a service of ``Type=notify``; nothing is sent if systemd did not start the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator

_USEC = 1_000_000


def ready(status: str = "") -> None:
    """Report that the server is ready, at startup or after `reloading`."""
    _notify("READY=1", *([f"STATUS={status}"] if status else ()))


def reloading() -> None:
    """Report that the settings are being reloaded; the caller must call `ready` afterwards, even after an error."""
    _notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping() -> None:
    """Report that the server is stopping."""
    _notify("STOPPING=1")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """During the block, notify systemd's watchdog twice per ``WatchdogSec``, so that it detects a stuck event loop."""
    period = _period()
    if period is None:
        yield
        return
    beating = asyncio.create_task(_beat(period))
    try:
        yield
    finally:
        beating.cancel()


async def _beat(period: float) -> None:
    while True:
        _notify("WATCHDOG=1")
        await asyncio.sleep(period)


def _period() -> float | None:
    for_me = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not for_me or not microseconds.isdecimal() or not int(microseconds):
        return None
    return int(microseconds) / _USEC / 2


def _notify(*lines: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A failed notification must not stop the server; systemd has its own timeout.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect("\0" + address[1:] if address.startswith("@") else address)
        to.send("\n".join(lines).encode())
