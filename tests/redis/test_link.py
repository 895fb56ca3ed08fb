"""The link to Redis: the caller always learns whether its command was executed, was not, or may have been."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import pytest

from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.failures import (
    AnswerLost,
    Failure,
    NoScript,
    NotReached,
    Refused,
)
from tests.redis.backends import PATIENCE, counted_wakeups, until
from tests.redis.conftest import MakeServer
from tests.redis.links import KEY, SHORT, Puppet, linked, linked_by_proxy, linked_to_puppet, raw
from tests.redis.servers import RedisServer, wait_until

COUNT = "return redis.call('INCR', KEYS[1])"


async def failing(link: RedisClient, *words: str | int, resend: bool = True) -> Failure:
    """Run a command and return the failure that it raises."""
    with pytest.raises(Failure) as caught:
        await link.command(KEY, *words, resend=resend)
    return caught.value


def ready(link: RedisClient) -> bool:
    """Return whether the link has an open connection."""
    node = link._topology.find(KEY)
    return node is not None and node.connection is not None and node.connection.open


async def test_raw_replies(each_redis: RedisServer, redis_prefix: str) -> None:
    """Replies are returned as Redis sends them; arguments may be text, bytes or numbers."""
    async with linked(each_redis.url) as link:
        script = "return {ARGV[1], 7, false, {ARGV[2], ARGV[3]}, redis.status_reply('FINE')}"
        reply = await link.command(redis_prefix, "EVAL", script, 0, b"\x00\xff", 1.5, "é")
        assert reply == [b"\x00\xff", 7, None, [b"1.5", "é".encode()], b"FINE"]
        assert await link.command(redis_prefix, "GET", redis_prefix) is None
        assert await link.everywhere("PING") == [b"PONG"]


async def test_concurrent_callers_get_their_own_answers(each_redis: RedisServer) -> None:
    """OPEN-E2: callers share one connection and each gets its own answer, even if others are cancelled.

    Fault E4.
    """
    async with linked(each_redis.url, in_flight=50) as link:
        before = int(each_redis.info()["total_connections_received"])
        for round_ in range(20):
            calls = [
                asyncio.create_task(link.command(KEY, "ECHO", f"{round_}-{n}")) for n in range(200)
            ]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for call in calls[:: 2 + round_ % 3]:
                call.cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for n, answer in enumerate(answers):
                assert answer == f"{round_}-{n}".encode() or isinstance(
                    answer, asyncio.CancelledError
                )
            assert sum(isinstance(answer, bytes) for answer in answers) >= 100
        received = int(each_redis.info()["total_connections_received"])
        assert received - before == 2  # one connection of the link, and one of this query


async def test_a_follow_up_runs_on_the_same_connection(each_redis: RedisServer) -> None:
    """A follow-up command gets the reply of the first one and runs on the same connection.

    The number of connections is bounded.
    """
    async with linked(each_redis.url, connections=3) as link:

        def follow(reply: int) -> tuple[str, ...]:
            return ("EVAL", f"return {reply}", "0") if reply % 2 else ("CLIENT", "ID")

        ids = await asyncio.gather(
            *(
                link.command(KEY, "CLIENT", "ID", follow=lambda _: ("CLIENT", "ID"))
                for _ in range(30)
            )
        )
        assert all(first == second for first, second in ids)
        assert len({first for first, _ in ids}) == 3
        assert await link.command(KEY, "EVAL", "return 3", 0, follow=follow) == (3, 3)
        assert await link.command(KEY, "EVAL", "return 3", 0, follow=lambda _: None) == (3, None)


async def test_a_cancelled_follow_up_leaves_no_answer_behind(each_redis: RedisServer) -> None:
    """Fault E4: after a cancelled call, a connection with a pending answer is not used again."""
    async with linked(each_redis.url, connections=1) as link:
        for turns in range(12):
            call = asyncio.create_task(
                link.command(KEY, "ECHO", "a", follow=lambda _: ("BLPOP", KEY, "0.05"))
            )
            for _ in range(turns):
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            pair = await link.command(KEY, "ECHO", f"{turns}", follow=lambda _: ("ECHO", "x"))
            assert pair == (f"{turns}".encode(), b"x")


async def test_nothing_reached(caplog: pytest.LogCaptureFixture) -> None:
    """If the port is closed, the caller gets an error at its time limit, which says that nothing was executed."""
    async with Puppet(lambda _, __: b"+OK\r\n") as puppet:
        url = puppet.url
    async with linked(url, **SHORT | {"operation_timeout": 0.3}) as link:
        assert isinstance(await failing(link, "PING"), NotReached)
        assert isinstance(await failing(link, "PING", resend=False), NotReached)
        assert link.trouble.text
        assert "Connection refused" in caplog.text


async def test_an_answer_that_is_lost() -> None:
    """Faults E1 and E2: a command whose answer was lost is sent again only if the caller allows it."""
    async with (
        Puppet(lambda n, _: None if n <= 2 else b":7\r\n") as puppet,
        linked(puppet.url, **SHORT) as link,
    ):
        assert isinstance(await failing(link, "INCR", "k", resend=False), AnswerLost)
        assert len(puppet.heard) == 1
        assert await link.command(KEY, "INCR", "k") == 7
        assert len(puppet.heard) == 3


@pytest.mark.parametrize(
    ("second", "raised"),
    [
        (b"-OOM command not allowed\r\n", AnswerLost),
        (b"-LOADING\r\n", AnswerLost),
        (b"-NOSCRIPT\r\n", NoScript),
    ],
)
async def test_what_was_lost_once_stays_uncertain(second: bytes, raised: type[Failure]) -> None:
    """Fault E1: once an answer was lost, no later error of the same call claims that nothing was executed."""

    def answers(n: int, _: Sequence[bytes]) -> bytes | None:
        return None if n == 1 else second

    async with linked_to_puppet(answers, operation_timeout=0.3) as (_, link):
        failure = await failing(link, "EVALSHA", "x", 0)
        assert type(failure) is raised
        assert failure.uncertain
        with pytest.raises(raised):
            await link.command(KEY, "EVAL", "x", 0, uncertain=True)
    async with linked_to_puppet(lambda _, __: second, operation_timeout=0.3) as (_, link):
        failure = await failing(link, "EVALSHA", "x", 0)
        assert isinstance(failure, NotReached | Refused | NoScript)
        assert not failure.uncertain


async def test_silence() -> None:
    """Fault B10: a call to a frozen server fails in time, and its late answer is not given to another call."""
    async with linked_to_puppet(lambda n, _: b"" if n <= 2 else b":3\r\n", answer_timeout=0.1) as (
        puppet,
        link,
    ):
        lost = await asyncio.gather(*(failing(link, "INCR", "k", resend=False) for _ in range(2)))
        assert [type(failure) for failure in lost] == [AnswerLost] * 2
        assert puppet.connections == 1
        assert await link.command(KEY, "INCR", "k") == 3
        assert puppet.connections == 2


async def test_the_time_limit_holds_in_the_middle_of_a_try() -> None:
    """If the time limit passes while an answer is pending, the error says that the command may have been executed."""
    async with Puppet(lambda _, __: b"") as puppet:
        limits = SHORT | {"operation_timeout": 0.15, "answer_timeout": 5}
        async with linked(puppet.url, **limits) as link:
            lost = await asyncio.gather(
                *(link.command(KEY, "PING", follow=lambda _: None) for _ in range(3)),
                return_exceptions=True,
            )
            assert [type(failure) for failure in lost] == [AnswerLost] * 3


async def test_callers_wait_for_a_place() -> None:
    """Fault B17: calls beyond the limit of calls in flight wait; if their time passes, they have sent nothing."""
    async with Puppet(lambda n, _: b"" if n == 1 else b":1\r\n:2\r\n") as puppet:
        limits = SHORT | {"operation_timeout": 0.2, "answer_timeout": 5}
        async with linked(puppet.url, in_flight=1, **limits) as link:
            first = asyncio.create_task(link.command(KEY, "INCR", "a"))
            await puppet.called.wait()
            assert isinstance(await failing(link, "INCR", "b"), NotReached)
            assert [words[1] for words in puppet.heard] == [b"a"]
            first.cancel()


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b":1\r\n:2\r\n+"]
)
async def test_damaged_answers(garbage: bytes) -> None:
    """Fault E8: a reply that violates the protocol closes the connection and is given to no later call."""

    def answers(n: int, _: Sequence[bytes]) -> bytes:
        return garbage if n == 1 else b":%d\r\n" % n

    async with Puppet(answers) as puppet, linked(puppet.url, **SHORT) as link:
        results = await asyncio.gather(
            *(link.command(KEY, "INCR", "a", resend=False) for _ in range(2)),
            return_exceptions=True,
        )
        assert all(isinstance(one, AnswerLost | int) for one in results)
        assert await link.command(KEY, "INCR", "a") == len(puppet.heard)
        assert puppet.connections == 2


async def test_small_pieces(each_redis: RedisServer) -> None:
    """Fault E7: replies and commands that arrive byte by byte are understood."""
    async with linked_by_proxy(each_redis.port) as (proxy, link):
        proxy.slice(1)
        words = [f"{n}".encode() * 20 for n in range(20)]
        answers = await asyncio.gather(*(link.command(KEY, "ECHO", word) for word in words))
        assert answers == words


async def test_lost_replies_of_a_real_server(each_redis: RedisServer, redis_prefix: str) -> None:
    """Faults E1 and E5: over cut connections and lost replies, each call is counted exactly as executed or not."""
    counter = f"{redis_prefix}:n"
    async with linked_by_proxy(each_redis.port) as (proxy, link):
        assert await link.command(KEY, "EVAL", COUNT, 1, counter) == 1
        proxy.lose_replies(1, after=b"INCR")
        assert isinstance(await failing(link, "INCR", counter, resend=False), AnswerLost)
        assert each_redis.call("GET", counter) == b"2"
        proxy.lose_replies(3, after=b"INCR")
        assert await link.command(KEY, "INCR", counter) == 6
        proxy.refuse()
        proxy.cut()
        await until(lambda: not ready(link))
        again = asyncio.create_task(link.command(KEY, "INCR", counter, resend=False))
        await asyncio.sleep(0.1)
        proxy.heal()
        assert await again == 7


async def test_idle_connections_that_the_server_closes(make_server: MakeServer) -> None:
    """Fault B18: connections closed by the server while idle are replaced, also for commands sent only once."""
    server = make_server(config={"timeout": "1"}).start()
    async with linked(server.url) as link:
        await link.command(KEY, "INCR", "k", resend=False, follow=lambda _: None)
        await link.command(KEY, "INCR", "k", resend=False)
        await asyncio.to_thread(
            wait_until, lambda: server.info()["connected_clients"] == "1", "all are closed"
        )
        assert await link.command(KEY, "INCR", "k", resend=False) == 3
        assert await link.command(KEY, "INCR", "k", resend=False, follow=lambda _: None) == (
            4,
            None,
        )
        assert link.trouble.text is None


async def test_a_paused_store(make_server: MakeServer) -> None:
    """Fault B16: a pause shorter than the time limits delays calls, and each command runs once."""
    server = make_server().start()
    async with linked(server.url) as link:
        await link.command(KEY, "PING")
        server.call("CLIENT", "PAUSE", 150, "WRITE")
        counted = await asyncio.gather(*(link.command(KEY, "INCR", "k") for _ in range(50)))
        assert sorted(counted) == list(range(1, 51))


async def test_a_store_that_is_gone_and_back(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Faults B1 and E9: during an outage, waiting calls do not poll and log at most once per second.

    They succeed once the server is back.
    """
    caplog.set_level(logging.INFO, "taskqueue.redis")
    server = make_server().start()
    async with linked(server.url, operation_timeout=2 * PATIENCE) as link:
        await link.command(KEY, "SET", "k", 1)
        server.kill()
        waiting = [asyncio.create_task(link.command(KEY, "INCR", "k")) for _ in range(50)]
        await until(lambda: link.trouble.text is not None, "it is seen")
        begun = time.monotonic()
        with counted_wakeups() as counted:
            await asyncio.sleep(0.7)
        away = time.monotonic() - begun
        # 50 callers that polled would wake the loop far more often.
        assert counted["wakeups"] < 50 * (1 + 10 * away)
        lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert 1 <= len(lines) <= 2 + away
        server.start()
        assert sorted(await asyncio.gather(*waiting)) == list(range(2, 52))
        assert link.trouble.text is None
        assert "works again" in caplog.records[-1].getMessage()


async def test_closing_ends_every_call(each_redis: RedisServer) -> None:
    """Closing the link ends all waiting calls with an error and leaves no connection or task."""
    async with linked(each_redis.url, operation_timeout=2 * PATIENCE) as link:
        await link.command(KEY, "PING")
        calls = [asyncio.create_task(link.command(KEY, "BLPOP", "none", 0)) for _ in range(3)]
        follow = lambda _: ("BLPOP", "none", 0)  # noqa: E731 - a name makes the next line short enough
        calls.append(asyncio.create_task(link.command(KEY, "PING", follow=follow)))
        await asyncio.sleep(0.02)
        await link.aclose()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ended] == [AnswerLost] * 4
        assert isinstance(await failing(link, "PING"), NotReached)
        with pytest.raises(NotReached):
            async with raw(link):
                pass
        with pytest.raises(NotReached):
            async with asyncio.timeout(PATIENCE):  # the call fails at once, without a retry
                await link.everywhere("PING")
        await link.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
