"""Background tasks of the Redis backend log an unexpected error and continue."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from taskqueue_core.tasks import Settled
from taskqueue_redis.connection.pubsub import PubSubListener
from taskqueue_redis.scripts.runner import ScriptRunner
from tests.redis.backends import KEY, PATIENCE, opened, publish, take, until
from tests.redis.servers import RedisServer
from tests.redis.test_wakeups import kill_bells


async def test_signs_of_life_go_on(
    redis_server: RedisServer,
    redis_url: str,
    redis_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A10, A12, BUG-D5: a heartbeat that fails with an unexpected error is logged, and the next one is sent."""
    real, failed = ScriptRunner.run, [0]

    async def run(self: ScriptRunner, name: str, *words: Any, **more: Any) -> Any:
        if name == "beat" and not failed[0]:
            failed[0] += 1
            raise RuntimeError("nobody has thought of this")
        return await real(self, name, *words, **more)

    monkeypatch.setattr(ScriptRunner, "run", run)
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "t")
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
            with caplog.at_level(logging.WARNING):
                await until(lambda: failed[0] == 1, "one has failed")
                alive = "ZSCORE", f"{{{redis_prefix}:0}}:alive", consumer.token
                seen = redis_server.call(*alive)
                await until(lambda: redis_server.call(*alive) > seen, "the next one is given")
            assert await consumer.ack(delivery) == (Settled.OK,)
    assert any("RuntimeError" in f"{r.message} {r.exc_text}" for r in caplog.records)


async def test_the_listener_continues_after_an_error(
    redis_server: RedisServer,
    redis_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A11, fault E5: a listener that fails unexpectedly logs it, connects again, and receives messages."""
    real, failed = PubSubListener._serve, [0]

    async def serve(self: PubSubListener, *rest: Any) -> None:
        if not failed[0]:
            failed[0] += 1
            raise RuntimeError("nobody has thought of this")
        await real(self, *rest)

    async with (
        opened(redis_server.url, redis_prefix) as backend,
        backend.subscribe([KEY], "c") as consumer,
    ):
        receive = asyncio.create_task(consumer.receive(1, None))
        await until(lambda: consumer.asleep, "it waits")
        monkeypatch.setattr(PubSubListener, "_serve", serve)
        await asyncio.to_thread(kill_bells, redis_server)
        await until(lambda: failed[0] == 1, "it has failed")
        await publish(backend, "t")
        async with asyncio.timeout(PATIENCE):
            assert [d.task.id for d in (await receive).deliveries] == ["t"]
    assert any("RuntimeError" in f"{r.message} {r.exc_text}" for r in caplog.records)
