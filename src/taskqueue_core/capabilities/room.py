"""``flow``: a signal for publishers that wait for room in a full queue."""

from __future__ import annotations

from typing import Protocol, Self

__all__ = ["RoomSignal", "RoomSignals"]


class RoomSignal(Protocol):
    """A notification that a queue that refused a task may accept one. An async context manager, active while open."""

    async def wait(self, timeout: float) -> None:
        """Wait until it was notified since it was opened or last waited for, up to ``timeout`` seconds.

        It is notified when room comes, an intake is resumed or settings change, and perhaps without cause.
        """
        ...

    async def __aenter__(self) -> Self:
        """Return it once it is notified of all that happens from now on."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        ...


class RoomSignals(Protocol):
    """What the publisher of a backend with ``flow`` has."""

    def room_signal(self, *keys: str) -> RoomSignal:
        """Make a signal for some queues. It does no input or output before it is opened."""
        ...
