"""Part of the capability ``flow``: a notification for publishers that wait until a full queue accepts tasks again."""

from __future__ import annotations

from typing import Protocol, Self


class RoomSignal(Protocol):
    """A signal that queues may accept tasks again, or that slots may be free. Active while its context is open."""

    async def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a notification; return at once if one was sent since the last call.

        A notification is sent when a task leaves a full queue, publishing is resumed or the settings change. There may
        also be notifications without such a change, so the caller must try again, and may be refused again.
        """

    async def __aenter__(self) -> Self:
        """Return the signal once it is active; from then on, it misses no notification."""

    async def __aexit__(self, *_: object) -> None:
        """Close the signal."""


class RoomSignals(Protocol):
    """The additional method of a publisher whose backend has the capability ``flow``."""

    def room_signal(self, *keys: str) -> RoomSignal:
        """Return a signal for the queues ``keys``. It performs no I/O until it is opened."""
