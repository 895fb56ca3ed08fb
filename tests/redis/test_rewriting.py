"""Rewriting the append-only file after a crash, which may have left an incomplete transaction at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from taskqueue_redis import RedisBackend
from taskqueue_redis.connection.client import Ask
from taskqueue_redis.connection.connection import Word
from taskqueue_redis.connection.failures import ErrorReply, NotReached, classify
from taskqueue_redis.setup import aof_rewrite
from taskqueue_redis.setup.aof_rewrite import AofReading, rewrite_logs
from taskqueue_redis.setup.permissions import access_list
from tests.redis.backends import KEY, opened, publish, take, until
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer, wait_until

_END = b"*1\r\n$4\r\nEXEC\r\n"
_WRITTEN = {"appendfsync": "always"}
"""because otherwise Redis may answer before it has written to the file"""


def _tear(server: RedisServer) -> None:
    """Cut the append-only file within its last transaction, as a kill or a power cut can do."""
    files = [
        path
        for path in server.folder.rglob("appendonly.aof*")
        if path.is_file() and path.name.endswith((".incr.aof", "only.aof"))
    ]
    (file,) = files
    written = file.read_bytes()
    assert written.endswith(_END)
    file.write_bytes(written[: -len(_END) - 3])


async def _work(backend: RedisBackend, name: str) -> None:
    """Publish two tasks, execute one of them, and leave the other waiting."""
    await publish(backend, f"{name}-waits", priority=1)
    await publish(backend, f"{name}-runs")
    async with backend.subscribe([KEY], "c") as subscription:
        (delivery,) = await take(subscription, 1)
        assert delivery.task.id == f"{name}-runs"
        await subscription.ack(delivery)


@pytest.mark.oldest
@pytest.mark.parametrize("lives", [True, False], ids=["client-lives-on", "client-comes-later"])
async def test_half_a_script_does_not_come_back(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str, *, lives: bool
) -> None:
    """Law 5, faults B1 and B2: after a kill during a write, and another kill later, counters and tasks still agree."""
    server = make_server(each_engine, config=_WRITTEN).start()
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
        await asyncio.to_thread(wait_until, server.whole, "its file is written anew")
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
    """A server that started without a file, or already rewrote it, is not asked to rewrite it."""
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
            await asyncio.to_thread(wait_until, server.whole, "it is written anew")
    assert rewrites() == 1


@pytest.mark.parametrize("preamble", ["yes", "no"])
async def test_a_publisher_that_did_not_notice(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str, preamble: str
) -> None:
    """Law 5, faults B1 and B2: the file is rewritten even if no client used Redis when it was killed and restarted."""
    server = make_server(each_engine, config={**_WRITTEN, "aof-use-rdb-preamble": preamble}).start()
    async with opened(server.url, redis_prefix) as backend:
        await publish(backend, "first")
        await publish(backend, "torn", not_before=backend.now() + 3600)
        await asyncio.to_thread(server.kill)
        _tear(server)
        await asyncio.to_thread(server.start)
        await publish(backend, "second")
        await asyncio.to_thread(wait_until, server.whole, "its file is written anew")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert await backend.control.statuses(KEY, "torn") == (None,)
    recounted(server, redis_prefix)


async def test_one_that_fails_is_tried_again(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Fault B1: if rewriting the file fails, the log says so once, and it is tried again."""
    monkeypatch.setattr(aof_rewrite, "_RETRY_SECONDS", 0.1)
    server = make_server(each_engine, config={"rdb-key-save-delay": "1000000"}).start()
    async with opened(server.url, redis_prefix) as backend:
        await publish(backend, "first")
        await asyncio.to_thread(server.restart)
        await publish(backend, "second")
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        await asyncio.to_thread(wait_until, lambda: bool(children.read_text()), "it is at it")
        server.call("CONFIG", "SET", "rdb-key-save-delay", "0")
        os.kill(int(await asyncio.to_thread(children.read_text)), signal.SIGKILL)
        await asyncio.to_thread(wait_until, server.whole, "its file is written anew")
    assert len([line for line in caplog.messages if "BGREWRITEAOF failed" in line]) == 1


class _Master:
    """A fake Redis master with scripted INFO fields and a scripted answer to BGREWRITEAOF."""

    def __init__(self, rewriting: str, **facts: str) -> None:
        usual = {
            "loading": "0", "aof_enabled": "1", "aof_base_size": "9", "aof_current_size": "9",
            "aof_last_rewrite_time_sec": "-1", "aof_last_bgrewrite_status": "ok",
            "aof_rewrite_in_progress": "0", "aof_rewrite_scheduled": "0", "redis_version": "7.0.15",
        }  # fmt: skip
        self.info = "\r\n".join(f"{name}:{fact}" for name, fact in (usual | facts).items())
        self.rewriting = rewriting
        self.asked = 0

    async def ask(self, words: Sequence[Word]) -> Any:
        if words[0] == "INFO":
            if not self.info:
                raise NotReached("it is away")
            return self.info.encode()
        assert words == ("BGREWRITEAOF",)
        self.asked += 1
        if self.rewriting:
            raise classify(ErrorReply(self.rewriting))[1]
        return b"OK"


class _Masters:
    """A link to several fake masters."""

    def __init__(self, *masters: _Master) -> None:
        self.masters = masters

    async def at_each_master(self, do: Callable[[Ask], Awaitable[AofReading]]) -> list[AofReading]:
        return [await do(master.ask) for master in self.masters]


_FORK = "ERR Can't execute an AOF background rewriting. Please check the server logs for more information."


@pytest.mark.parametrize(
    ("master", "look", "asked"),
    [
        (_Master(""), AofReading(whole=False), 1),
        (_Master("", loading="1"), AofReading(whole=False), 0),
        (_Master("", aof_enabled="0"), AofReading(whole=True), 0),
        (_Master("", aof_base_size="0"), AofReading(whole=False), 1),
        (_Master("", aof_base_size="0", aof_current_size="0"), AofReading(whole=True), 0),
        (_Master("", aof_base_size="0", redis_version="6.2.14"), AofReading(whole=True), 0),
        (_Master("", aof_last_rewrite_time_sec="3"), AofReading(whole=True), 0),
        (_Master("", aof_rewrite_in_progress="1"), AofReading(whole=False), 0),
        (_Master("", aof_rewrite_scheduled="1"), AofReading(whole=False), 0),
        (_Master("ERR Background append only file rewriting already in progress"), AofReading(whole=False), 1),
        (_Master(_FORK), AofReading(whole=False, obstacle="BGREWRITEAOF failed; see the log of Redis"), 1),
    ],
)  # fmt: skip
async def test_what_is_found(master: _Master, look: AofReading, asked: int) -> None:
    """A master whose file may be incomplete is asked to rewrite it, and read again until the file is complete."""
    away, whole = _Master(""), _Master("", aof_last_rewrite_time_sec="3")
    away.info = ""
    assert await rewrite_logs(_Masters(whole, master, whole)) == look  # type: ignore[arg-type]
    assert master.asked == asked
    assert not (await rewrite_logs(_Masters(away, master))).whole  # type: ignore[arg-type]
    assert master.asked == 2 * asked, "one that is away does not hide the others"


async def test_a_missing_right_is_logged(
    make_server: MakeServer, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right to rewrite the file, everything else works, and the log says once what to do by hand."""
    rules = access_list(redis_prefix, password=">pw").replace(" +bgrewriteaof", "")
    server = make_server(acl=rules).start()
    server.login = ("taskqueue", "pw")

    def told() -> list[str]:
        return [line for line in caplog.messages if "BGREWRITEAOF" in line]

    caplog.set_level(logging.WARNING, "taskqueue.redis")
    async with opened(server.url, redis_prefix) as backend:
        await _work(backend, "first")
        await asyncio.to_thread(server.restart)
        await _work(backend, "second")
        await until(lambda: bool(told()), "the log tells it")
        await asyncio.to_thread(server.restart)
        await _work(backend, "third")
        health = await backend.health()
    assert health.ok
    assert len(told()) == 1
    assert "run BGREWRITEAOF yourself" in told()[0]
    assert ":pw@" not in told()[0]
