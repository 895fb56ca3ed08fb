"""``flow``: beside what the settings limit, to be told of room instead of asking for it."""

from __future__ import annotations

from typing import Protocol, Self

__all__ = ["RoomSignal", "RoomSignals"]


class RoomSignal(Protocol):
    """Rings when a queue that refused a task may take one in. An async context manager: it rings while it is open."""

    async def wait(self, timeout: float) -> None:
        """Wait until it has rung since it was opened or last waited for, up to ``timeout`` seconds.

        It rings when room comes, an intake is resumed or settings change, and may ring without cause.
        """
        ...

    async def __aenter__(self) -> Self:
        """Return it once it rings for all that happens from now on."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Ring no more."""
        ...


class RoomSignals(Protocol):
    """What the publisher of a backend with ``flow`` has."""

    def room_signal(self, *keys: str) -> RoomSignal:
        """Make a bell for some queues. It does no input or output before it is opened."""
        ...
