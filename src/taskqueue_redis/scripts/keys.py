"""Names in Redis: which partition a queue lives in, and the channels on which scripts ring."""

from __future__ import annotations

import zlib


def signal_channel(partition: str, key: str) -> str:
    """Return the channel that rings when a queue gets work; without a key, when something falls due earlier."""
    return f"{partition}:bell:{key}"


def room_channel(partition: str, key: str) -> str:
    """Return the channel that rings when a queue that refused a task may take one in."""
    return f"{partition}:room:{key}"


def slots_channel(partition: str, model: str) -> str:
    """Return the channel that rings when a slot of a model may have become free, or a note was left."""
    return f"{partition}:slots:{model}"


def process_channel(partition: str, process: str) -> str:
    """Return the channel that tells a process of deliveries which its consumers have lost."""
    return f"{partition}:process:{process}"


class Partitions:
    """What one script can touch at once: the names of all keys of a partition begin with the same hash tag."""

    def __init__(self, prefix: str, number: int) -> None:
        """Name ``number`` partitions."""
        self.names = tuple(f"{{{prefix}:{n}}}" for n in range(number))

    def of(self, key: str) -> str:
        """Return the partition of a queue."""
        if len(self.names) == 1:
            return self.names[0]
        return self.names[zlib.crc32(key.encode()) % len(self.names)]

    def group(self, keys: tuple[str, ...]) -> dict[str, list[str]]:
        """Return keys by partition, in their order."""
        grouped: dict[str, list[str]] = {}
        for key in keys:
            grouped.setdefault(self.of(key), []).append(key)
        return grouped
