"""How many partitions an installation has, for those who read it: it is the store that knows."""

from __future__ import annotations

from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.scripts.keys import Partitions

__all__ = ["installed"]


async def installed(link: Link) -> Partitions:
    """Return the partitions that there are; where nothing is installed yet, what the settings say.

    Raises `BackendUnavailable`.
    """
    told = Partitions(link.settings.prefix, link.settings.partitions_of)
    first = told.names[0]
    with translated():
        number = await link.command(first, "HGET", f"{first}:meta", "partitions")
    return told if number is None else Partitions(link.settings.prefix, int(number))
