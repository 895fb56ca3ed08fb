"""Schedules through both changes of the clock in five zones, on Redis."""

import pytest

from taskqueue_core.clock import ManualClock
from tests.core.zone_changes import Night, changes
from tests.redis.backends import opened
from tests.redis.servers import RedisServer


@pytest.mark.long
async def test_each_instant_of_the_calendar(redis_server: RedisServer, redis_prefix: str) -> None:
    """U14: three servers fire each instant around each change once; after an outage, as ``catch_up`` says."""
    for number, change in enumerate(changes()):
        clock, prefix = ManualClock(change.at - 86_400), f"{redis_prefix}{number}"
        async with (
            opened(redis_server.url, prefix, clock=clock) as one,
            opened(redis_server.url, prefix, clock=clock) as two,
            opened(redis_server.url, prefix, clock=clock) as three,
        ):
            await Night(change, clock, [one, two, three], loops=False).run(outage=number % 2 == 1)
