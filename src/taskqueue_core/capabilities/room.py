"""Part of the capability ``flow``: a notification for publishers that wait until a full queue accepts tasks again."""

from __future__ import annotations

from typing import Protocol, Self


class RoomSignal(Protocol):
    """A notification that queues may accept tasks again: an async context manager, which is active while it is open."""

    async def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a notification. Return at once if one was sent since the last call.

        A notification is sent when a task leaves a full queue, publishing is resumed or the settings change. It may
        also be sent without a reason, so the caller has to try again and may be refused again.
        """

    async def __aenter__(self) -> Self:
        """Return the signal once it is active: it misses no notification from now on."""

    async def __aexit__(self, *_: object) -> None:
        """Close the signal."""


class RoomSignals(Protocol):
    """The additional method of the publisher, for backends with the capability ``flow``."""

    def room_signal(self, *keys: str) -> RoomSignal:
        """Return a signal for some queues. It does no I/O before it is opened."""
