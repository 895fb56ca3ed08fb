"""Senders of callbacks that are killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from taskqueue_dispatch.names import CALLBACKS
from tests.dispatch.calling_back import ended, ids, job_for, tell
from tests.dispatch.receivers import OK, Receiver, receiving, sending, settings
from tests.redis.backends import housekept, opened
from tests.redis.servers import RedisServer
from tests.server.support import eventually

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def a_sender(
    server: RedisServer, prefix: str, receiver: Receiver
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that sends; it is killed in the end."""
    words = ["-m", "tests.dispatch.sender_process", server.url, prefix, str(receiver.port)]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_after_the_post(redis_server: RedisServer, redis_prefix: str) -> None:
    """Killed when the receiver has it and nobody has noted that: sent again, the same (R15, fault I2)."""
    stay = asyncio.Event()

    async def holds(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await stay.wait()

    async with (
        opened(redis_server.url, redis_prefix) as backend,
        housekept(backend),
        receiving(holds, OK) as receiver,
    ):
        job = job_for(receiver)
        await tell(backend, job)
        async with a_sender(redis_server, redis_prefix, receiver) as process:
            await eventually(lambda: receiver.calls, 20)
            process.kill()
            assert await process.wait() == -9
        async with sending(backend, settings(receiver)) as sender:
            (record,) = await ended(sender, job, seconds=20)
        (status,) = await backend.control.statuses(CALLBACKS, record.webhook_id)
        ledger = await backend.control.ledger(CALLBACKS)
    assert status is not None
    assert (record.state, status.attempt, status.losses) == ("delivered", 1, 1)
    assert len(receiver.calls) == 2
    assert ids(receiver.calls) == {record.webhook_id}
    assert len({call.body for call in receiver.calls}) == 1
    assert (ledger.published, ledger.done, ledger.imbalance) == (1, 1, 0)
