"""Codecs with schedules, sizes and several registries, and wrong codecs."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core import (
    CodecChain,
    Cron,
    Fernet,
    Handle,
    Instant,
    Middleware,
    Schedule,
    Tasks,
    Zlib,
    connect,
)
from taskqueue_core.application.encoding import CODEC_HEADER
from taskqueue_core.errors import ConfigurationError, TooLarge
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.sync import LoopCalls, SyncQueue
from taskqueue_core.tasks import Published, Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from taskqueue_worker.testing import TestQueue
from tests.application.running import OpenWorld, working
from tests.application.vault import NEW, OLD, RUNS, SECRET, Vault, plain_charge


async def test_calls_are_plain_for_middleware() -> None:
    """A middleware sees the plain payload, and what it sends is encoded."""
    seen: list[bytes] = []

    class Looking(Middleware):
        async def publish(self, call: Any, send: Any) -> Any:
            seen.append(call.payload)
            return await send(call)

    vault = Vault(None, Looking())
    async with TestQueue(vault.tasks) as taskqueue:
        await vault.charge.publish(SECRET)
        taskqueue.assert_published(vault.charge, card=SECRET)
    assert SECRET.encode() in seen[0]


async def test_schedules() -> None:
    """U13, U17: the call of a schedule is stored encoded, an `Instant` is added to it, and apply writes it once."""
    vault = Vault()
    vault.tasks.schedule("daily", vault.report.call(SECRET, Instant), Cron("@daily"))
    vault.tasks.schedule("hourly", vault.charge.call(SECRET), Cron("@hourly"), overlap="allow")
    RUNS.clear()
    async with TestQueue(vault.tasks, start=1_767_225_600) as taskqueue:
        status = await taskqueue.queue.schedules.get("vault.daily")
        assert status is not None
        assert SECRET.encode() not in repr(status).encode()
        blocking = SyncQueue(taskqueue.queue, LoopCalls(asyncio.get_running_loop()))
        again = Vault()
        again.tasks.schedule("daily", again.report.call(SECRET, Instant), Cron("@daily"))
        again.tasks.schedule("hourly", again.charge.call(SECRET), Cron("@hourly"), overlap="allow")
        with again.tasks.replaced_by(taskqueue.queue, blocking):
            assert (await again.tasks.apply(dry_run=True)).schedules == ()
        other = Vault()
        other.tasks.schedule("daily", other.report.call("card-1", Instant), Cron("@daily"))
        with other.tasks.replaced_by(taskqueue.queue, blocking):
            (first, *_) = (await other.tasks.apply(dry_run=True)).schedules
            assert (first.name, first.change) == ("vault.daily", "changed")
        await taskqueue.advance(86_400)
        assert RUNS.count(SECRET) == 24
        assert RUNS.count(f"{SECRET} 2026-01-02T00:00:00Z") == 1
        await taskqueue.queue.schedules.trigger("vault.hourly")
        (confirmation,) = await taskqueue.queue.publish_many(
            [await _scheduled(taskqueue.queue, "vault.hourly")]
        )
        assert confirmation.status is Published.ACCEPTED


async def _scheduled(queue: Queue, name: str) -> Task:
    status = await queue.schedules.get(name)
    assert status is not None
    assert isinstance(status.schedule, Schedule)
    return status.schedule.task.task("again", name, 0.0, 0.0)


async def test_sizes() -> None:
    """Limits hold for the encoded size: what compresses well may be larger, and what does not fit is refused."""
    vault = Vault(Zlib())
    async with TestQueue(vault.tasks) as taskqueue:
        large = "x" * (LIMITS.payload * 4)
        handle = await vault.charge.publish(large)
        await taskqueue.drain()
        assert await handle.result() == f"{large} pays 5"
        noise = hashlib.shake_128(b"").hexdigest(LIMITS.payload)
        with pytest.raises(TooLarge, match="as encoded by zlib"):
            await vault.charge.publish(noise)
        with pytest.raises(TooLarge, match="limit decoded"):
            await vault.charge.publish("x" * LIMITS.decoded)
        with pytest.raises(TooLarge, match="as encoded by zlib"):
            vault.charge.call(noise).template()
    encrypted = Vault(Fernet(keys=[NEW]))
    async with TestQueue(encrypted.tasks) as taskqueue:
        most = (LIMITS.payload - 2) // 4 * 3 - 57 - 16 - len('{"card":"","amount":5}')
        measured = await encrypted.measure.publish("y" * most)
        (published,) = taskqueue.published(encrypted.measure)
        assert LIMITS.payload - 64 < len(published.task.payload) <= LIMITS.payload
        await taskqueue.drain()
        assert await measured.result() == most
        empty: Handle[Any] = await encrypted.print_all.publish([""])
        await taskqueue.drain()
        assert await empty.result() == ""


async def test_headers_of_an_encoded_task_are_not_copied() -> None:
    """A plain task that is published with the headers of an encoded one does not count as encoded."""
    async with connect("taskqueue_memory") as queue:
        task = await Vault().charge.call(SECRET).task(queue)
        copied = await plain_charge().using(headers=dict(task.headers)).call(SECRET).task(queue)
    assert CODEC_HEADER not in copied.headers


def test_wrong_codecs() -> None:
    """A codec that is none, and keys that are none, are errors at import, which do not show the keys."""
    for wrong in (Zlib, "zlib", object(), b""):
        with pytest.raises(ConfigurationError, match="expected an object with the methods encode"):
            Tasks(codec=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="above"):
        Zlib(above=-1)
    key = Cipher.generate_key().decode()
    wrong_keys: list[Any] = [key, [], {}, [key[:-4]], [key, 5], {"a b": key}, {"": key}, None]
    for keys in wrong_keys:
        with pytest.raises(ConfigurationError) as caught:
            Fernet(keys=keys)
        assert key[:8] not in str(caught.value)
    with pytest.raises(ConfigurationError, match="digest_key"):
        Fernet(keys=[key], digest_key="short")
    with pytest.raises(ConfigurationError, match="the same name"):
        CodecChain(Zlib(), CodecChain(Zlib()))
    with pytest.raises(ConfigurationError, match="got 0 codecs"):
        CodecChain()
    codec = CodecChain(Zlib(), Fernet(keys={"2026-11": key}))
    for shown in (repr(codec), str(codec), repr(Tasks(codec=codec)), repr(vars(codec))):
        assert key[:8] not in shown


def test_included_registries() -> None:
    """A registry with a codec includes only registries that have one; one without includes any."""
    plain, encoded = Tasks(prefix="plain."), Tasks(prefix="encoded.", codec=Zlib())
    with pytest.raises(ConfigurationError, match=r"the one with the prefix 'plain\.' has none"):
        encoded.include(plain)
    both = Tasks()
    both.include(plain, encoded)


async def test_mixed_registries() -> None:
    """One worker runs tasks of registries with different codecs and without one."""
    vault, packed = Vault(), Tasks(prefix="packed.", codec=Zlib(above=0))
    plain = Tasks(prefix="plain.")

    @packed.task
    async def pack(text: str) -> str:
        charged: str = await vault.charge(text)
        return charged + await (await show.publish(text)).result(10)

    @plain.task
    async def show(text: str) -> str:
        return text

    backend = MemoryBackend()
    worker = LocalWorker(vault.tasks, packed, plain, backend=backend)
    async with connect(backend) as queue, packed.connect(queue), working(worker):
        assert await (await pack.publish(SECRET)).result(10) == f"{SECRET} pays 5{SECRET}"


async def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, `Fernet` names the extra; the rest works."""
    monkeypatch.setitem(__import__("sys").modules, "cryptography.fernet", None)
    with pytest.raises(ConfigurationError, match="extra 'crypto'"):
        Fernet(keys=[NEW])
    await asyncio.sleep(0)
    assert Zlib().decode(Zlib().encode(b"data"), None) == b"data"


async def test_schedules_on_each_store(world: OpenWorld) -> None:
    """U13, U17: a declared schedule is written once, fires encoded, and a new key writes it again."""
    RUNS.clear()

    def declared(*keys: bytes) -> Vault:
        vault = Vault(Fernet(keys=keys))
        call = vault.report.call(SECRET, Instant)
        vault.tasks.schedule("yearly", call, Cron("@yearly"), overlap="allow")
        return vault

    async with world() as it, connect(it.backend) as queue:
        for keys, changes in (
            ((OLD,), ["created"]),
            ((OLD,), []),
            ((OLD, NEW), []),
            ((NEW, OLD), ["changed"]),
        ):
            vault = declared(*keys)
            async with vault.tasks.connect(queue):
                applied = (await vault.tasks.apply()).schedules
                assert [str(each.change) for each in applied] == changes
        confirmation = await queue.schedules.trigger("vault.yearly")
        vault = declared(NEW)
        async with working(it.worker(vault.tasks)), vault.tasks.connect(queue):
            assert await vault.report.handle(confirmation.task_id).result(10) == SECRET
    ((card, instant),) = [run.split() for run in RUNS]
    assert card == SECRET
    assert instant.endswith("Z")
