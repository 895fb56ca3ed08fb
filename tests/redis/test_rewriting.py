"""What a crash has torn at the end of Redis' append-only file does not come back with a later start."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from taskqueue_redis import RedisBackend
from taskqueue_redis.rights import access_list
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer, wait_until

_END = b"*1\r\n$4\r\nEXEC\r\n"


def _tear(server: RedisServer) -> None:
    """Cut its file in the midst of the last transaction's last write, as a kill or a power cut can."""
    files = [
        path
        for path in server.folder.rglob("appendonly.aof*")
        if path.is_file() and path.name.endswith((".incr.aof", "only.aof"))
    ]
    (file,) = files
    written = file.read_bytes()
    assert written.endswith(_END)
    file.write_bytes(written[: -len(_END) - 3])


def _rewritten(server: RedisServer) -> bool:
    told = server.info("persistence")
    return (
        told["aof_last_rewrite_time_sec"] != "-1"
        and told["aof_rewrite_in_progress"] == "0"
        and told["aof_last_bgrewrite_status"] == "ok"
    )


async def _work(backend: RedisBackend, name: str) -> None:
    """Publish one task, execute one, and leave one waiting."""
    await publish(backend, f"{name}-waits", priority=1)
    await publish(backend, f"{name}-runs")
    async with backend.subscribe([KEY], "c") as subscription:
        (delivery,) = await take(subscription, 1)
        assert delivery.task.id == f"{name}-runs"
        await subscription.ack(delivery)


@pytest.mark.parametrize("lives", [True, False], ids=["client-lives-on", "client-comes-later"])
async def test_half_a_script_does_not_come_back(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str, *, lives: bool
) -> None:
    """Law 5, faults B1 and B2: killed while it writes, killed again later; the books and the tasks agree after both."""
    server = make_server(each_engine).start()
    async with contextlib.AsyncExitStack() as stack:
        backend = await stack.enter_async_context(opened(server.url, redis_prefix))
        await _work(backend, "first")
        await publish(backend, "torn", not_before=backend.now() + 3600)
        await asyncio.to_thread(server.kill)
        _tear(server)
        if not lives:
            await stack.aclose()
        await asyncio.to_thread(server.start)
        if not lives:
            backend = await stack.enter_async_context(opened(server.url, redis_prefix))
        await _work(backend, "second")
        await asyncio.to_thread(wait_until, lambda: _rewritten(server), "its file is written anew")
        await _work(backend, "third")
        before = await backend.control.ledger(KEY)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await backend.control.statuses(KEY, "torn") == (None,)
        assert await backend.control.ledger(KEY) == before
    assert (before.published, before.done, before.waiting, before.scheduled) == (6, 3, 3, 0)
    recounted(server, redis_prefix)


async def test_once_per_start_and_only_where_there_was_a_file(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """One that began empty, and one that has written its file anew already, are left alone."""
    server = make_server(each_engine).start()

    def rewrites() -> int:
        return server.log().count("Background AOF rewrite finished successfully")

    async with opened(server.url, redis_prefix) as backend:
        await _work(backend, "first")
    assert not rewrites()
    await asyncio.to_thread(server.restart)
    for name in ("second", "third"):
        async with opened(server.url, redis_prefix) as backend:
            await _work(backend, name)
            await asyncio.to_thread(wait_until, lambda: _rewritten(server), "it is written anew")
    assert rewrites() == 1


async def test_who_may_not_ask_is_told(
    make_server: MakeServer, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right everything works as ever; the log says once what to do by hand."""
    rules = access_list(redis_prefix, password=">pw").replace(" +bgrewriteaof", "")
    server = make_server(acl=rules).start()
    server.login = ("taskqueue", "pw")
    async with opened(server.url, redis_prefix) as backend:
        await _work(backend, "first")
        await asyncio.to_thread(server.restart)
        await _work(backend, "second")
        await asyncio.to_thread(server.restart)
        with caplog.at_level(logging.WARNING, "taskqueue.redis"):
            await _work(backend, "third")
            health = await backend.health()
    assert health.ok
    told = [line for line in caplog.messages if "BGREWRITEAOF" in line]
    assert len(told) == 1
    assert "run BGREWRITEAOF yourself" in told[0]
    assert ":pw@" not in told[0]
