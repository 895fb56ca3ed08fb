"""The pub/sub listener: published messages reach its callbacks, also after lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.failures import Misconfigured, NotReached
from taskqueue_redis.connection.pubsub import PubSubListener
from taskqueue_redis.setup.permissions import access_list
from tests.redis.backends import PATIENCE, until
from tests.redis.conftest import MakeServer
from tests.redis.links import KEY, linked, linked_by_proxy
from tests.redis.servers import RedisServer


class Ears:
    """The messages received by a listener, and how often it reconnected."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.reopened = 0

    def hear(self, channel: str, message: bytes) -> None:
        """Record a message."""
        self.heard.append((channel, message))

    def reopen(self) -> None:
        """Count a reconnection."""
        self.reopened += 1


@asynccontextmanager
async def signal(link: RedisClient, **values: float) -> AsyncIterator[tuple[PubSubListener, Ears]]:
    """Open a listener whose callbacks are recorded, and close it afterwards."""
    ears = Ears()
    doorbell = PubSubListener(link, ears.hear, ears.reopen, **values)
    try:
        yield doorbell, ears
    finally:
        await doorbell.aclose()


async def test_what_is_published_is_heard(each_redis: RedisServer, redis_prefix: str) -> None:
    """Messages published after `listen` has returned are received in order; those published after `ignore` are not."""
    one, two = f"{{{redis_prefix}:0}}:bell:a", f"{{{redis_prefix}:0}}:process:é"
    async with linked(each_redis.url) as link, signal(link) as (doorbell, ears):
        await doorbell.listen(one, two)
        await doorbell.listen(one)
        assert doorbell.works
        for channel, message in ((one, b"1"), (two, b"\x00"), (one, b"")):
            assert await link.command(KEY, "PUBLISH", channel, message) == 1
        await until(lambda: len(ears.heard) == 3)
        assert ears.heard == [(one, b"1"), (two, b"\x00"), (one, b"")]
        doorbell.ignore(one)
        await link.command(KEY, "PUBLISH", one, b"no")
        await link.command(KEY, "PUBLISH", two, b"yes")
        await until(lambda: len(ears.heard) == 4)
        assert ears.heard[3] == (two, b"yes")
        doorbell.ignore(one, two)
        doorbell.ignore(one)
        await doorbell.listen(one)
        assert await link.command(KEY, "PUBLISH", one, b"again") == 1
        await until(lambda: len(ears.heard) == 5)
        assert ears.reopened == 0


async def test_thousands_of_channels_cost_one_connection(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """OPEN-E2: 5,000 channels need just one connection in addition to the one for commands."""
    async with linked(redis_server.url) as link, signal(link) as (doorbell, ears):
        await link.command(KEY, "PING")
        before = int(redis_server.info()["connected_clients"])
        channels = [f"{{{redis_prefix}:0}}:bell:{n}" for n in range(5000)]
        await asyncio.gather(*(doorbell.listen(*channels[n : n + 100]) for n in range(0, 5000, 50)))
        assert int(redis_server.info()["connected_clients"]) == before + 1
        assert await link.command(KEY, "PUBLISH", channels[-1], "x") == 1
        await until(lambda: bool(ears.heard))
        doorbell.ignore(*channels[1:])
        await until(lambda: redis_server.call("PUBLISH", channels[-1], "x") == 0)


async def test_listening_and_ignoring_in_turn(redis_server: RedisServer, redis_prefix: str) -> None:
    """Once `listen` has returned, messages are received, however often the channel was ignored before."""
    channel = f"{{{redis_prefix}:0}}:bell:a"
    async with linked(redis_server.url) as link, signal(link) as (doorbell, ears):
        for turn in range(100):
            await doorbell.listen(channel)
            assert await link.command(KEY, "PUBLISH", channel, "x") == 1
            await until(lambda seen=turn: len(ears.heard) > seen)  # type: ignore[misc]
            doorbell.ignore(channel)
            for _ in range(turn % 4):
                await asyncio.sleep(0)


async def test_a_lost_connection(make_server: MakeServer) -> None:
    """Faults B1 and E5: a lost connection is restored with its channels.

    A callback reports that messages may have been missed.
    """
    server = make_server().start()
    async with linked(server.url, operation_timeout=0.5) as link, signal(link) as (doorbell, ears):
        await doorbell.listen("a", "b")
        for turn in (1, 2, 3):
            server.call("CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: ears.reopened == turn)  # noqa: B023 - the lambda is called in this iteration
            assert server.call("PUBLISH", "b", f"{turn}") == 1
            await until(lambda: len(ears.heard) == turn)  # noqa: B023 - the lambda is called in this iteration
        server.kill()
        with pytest.raises(NotReached):
            await doorbell.listen("c")
        await until(lambda: not doorbell.works)
        server.start()
        await until(lambda: ears.reopened == 4)
        await until(lambda: doorbell.works)
        assert server.call("PUBLISH", "c", "wanted all the time") == 1


async def test_a_half_open_connection(redis_server: RedisServer, redis_prefix: str) -> None:
    """Fault C8: a connection without an answer to PING is replaced; an idle one that answers is kept."""
    channel = f"{{{redis_prefix}:0}}:bell:a"
    async with linked_by_proxy(redis_server.port) as (proxy, link):
        async with signal(link, quiet=0.05, patience=PATIENCE) as (doorbell, ears):
            await doorbell.listen(channel)
            opened, passed = proxy.opened, proxy.passed
            pings = 3 * len(
                "*1  $4  PING  +PONG  "
            )  # the second is sent after the answer to the first
            await until(lambda: proxy.passed > passed + pings, "PINGs and their answers")
            assert (proxy.opened, ears.reopened) == (opened, 0)
        async with signal(link, quiet=0.05, patience=0.1) as (doorbell, ears):
            await doorbell.listen(channel)
            proxy.block()
            await until(lambda: not doorbell.works)
            proxy.cut()
            proxy.heal()
            await until(lambda: ears.reopened > 0)
            await until(lambda: redis_server.call("PUBLISH", channel, "x") == 1)
            await until(lambda: (channel, b"x") in ears.heard)


async def test_a_callback_that_fails_harms_no_other(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of a callback is logged; the listener continues."""
    heard: list[bytes] = []

    def hear(_: str, message: bytes) -> None:
        heard.append(message)
        raise ValueError(message)

    async with linked(redis_server.url) as link:
        doorbell = PubSubListener(link, hear, lambda: None)
        await doorbell.listen("fails")
        for message in (b"1", b"2"):
            await link.command(KEY, "PUBLISH", "fails", message)
        await until(lambda: heard == [b"1", b"2"])
        await doorbell.aclose()
    assert "a callback for notifications failed" in caplog.text


async def test_rights(make_server: MakeServer) -> None:
    """Fault E9: the ACL file of the package allows channels of its prefix; others are refused with a remedy."""
    server = make_server(acl=access_list("tq", password=">pw")).start()
    server.login = ("taskqueue", "pw")
    async with linked(server.url) as link, signal(link) as (doorbell, ears):
        await doorbell.listen("{tq:0}:bell:a")
        await link.command("{tq:0}", "PUBLISH", "{tq:0}:bell:a", "x")
        await until(lambda: len(ears.heard) == 1)
        with pytest.raises(Misconfigured, match="lacks a right"):
            await doorbell.listen("elsewhere")
        doorbell.ignore("elsewhere")
        await until(lambda: ears.reopened == 1)
        await doorbell.listen("{tq:0}:bell:b")


async def test_closing(redis_server: RedisServer) -> None:
    """Closing the listener at any moment ends a waiting `listen` and leaves no tasks and no connections."""
    before = int(redis_server.info()["connected_clients"])
    for moment in range(12):
        async with linked(redis_server.url) as link:
            doorbell = PubSubListener(link, lambda _, __: None, lambda: None)
            waiting = asyncio.create_task(doorbell.listen("a"))
            for _ in range(moment):
                await asyncio.sleep(0)
            await doorbell.aclose()
            (end,) = await asyncio.gather(waiting, return_exceptions=True)
            assert end is None or isinstance(end, NotReached)
            with pytest.raises(NotReached):
                await doorbell.listen("a")
            await doorbell.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await until(lambda: int(redis_server.info()["connected_clients"]) == before)
