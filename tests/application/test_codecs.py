"""Codecs: what is stored is encoded, and what handlers and publishers see is not."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

import msgspec
import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core import (
    Codec,
    CodecChain,
    Cron,
    Fernet,
    Handle,
    Instant,
    Middleware,
    Reject,
    Retry,
    Schedule,
    TaskDead,
    TaskFunction,
    Tasks,
    Undecodable,
    Unique,
    Zlib,
    connect,
    gather,
)
from taskqueue_core.application.encoding import CODEC_HEADER
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.errors import ConfigurationError, IdConflict, TooLarge
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.sync import LoopCalls, SyncQueue
from taskqueue_core.tasks import Published, Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from taskqueue_worker.testing import TestQueue
from tests.application.running import OpenWorld, working

OLD, NEW = Cipher.generate_key(), Cipher.generate_key()
SECRET = "card-4711"
RUNS: list[str] = []


class Vault:
    """A registry with an encryption and a compression."""

    def __init__(self, codec: Codec | CodecChain | None = None, *middleware: Middleware) -> None:
        self.tasks = tasks = Tasks(
            prefix="vault.",
            codec=codec or CodecChain(Zlib(above=64), Fernet(keys={"new": NEW})),
            middleware=middleware,
        )

        @tasks.task
        async def charge(card: str, amount: int = 5) -> str:
            RUNS.append(card)
            return f"{card} pays {amount}"

        @tasks.task(retry=RetryPolicy(max_attempts=2, base=0, cap=0, jitter=0))
        async def fail(card: str, how: str) -> None:
            match how:
                case "reject":
                    raise Reject("no_money", f"{card} is empty")
                case "retry":
                    raise Retry(0, f"{card} is busy")
                case _:
                    raise LookupError(f"{card} is unknown")

        @tasks.task(unique=Unique(by=("card",)))
        async def renew(card: str) -> str:
            return card

        @tasks.task(batch=10)
        async def print_all(cards: list[str]) -> list[str]:
            return [card[::-1] for card in cards]

        @tasks.task
        async def measure(card: str) -> int:
            return len(card)

        @tasks.task
        async def report(card: str, day: str) -> str:
            RUNS.append(f"{card} {day}")
            return card

        self.charge, self.fail, self.renew = charge, fail, renew
        self.print_all, self.report, self.measure = print_all, report, measure


async def _everything(backend: Any, *keys: str) -> bytes:
    """Return all texts that an operator can see of the tasks of queues."""
    texts: list[Any] = []
    control, letters = control_of(backend), dead_letters_of(backend)
    for key in keys:
        texts += [await letters.list(key), await control.stats(key)]
    return repr(texts).encode()


async def test_round_trip(world: OpenWorld) -> None:
    """U17: payload and result are encoded in the store, and plain for the handler and the publisher."""
    vault = Vault()
    async with world() as it, connect(it.backend) as queue, vault.tasks.connect(queue):
        waiting = await vault.charge.using(delay=3600).publish(SECRET)
        status = await waiting.status()
        assert status is not None
        async with working(it.worker(vault.tasks)):
            handle = await vault.charge.publish(SECRET, amount=7)
            assert await handle.result(10) == f"{SECRET} pays 7"
            many = await vault.tasks.publish_many(vault.charge.call(SECRET) for _ in range(3))
            assert await gather(*many, timeout=10) == [f"{SECRET} pays 5"] * 3
            (one,) = await vault.tasks.publish_many([vault.print_all.call([SECRET])])
            assert await one.result(10) == SECRET[::-1]
        (stored,) = await control_of(it.backend).results(handle.key, handle.id)
        assert stored is not None
        assert SECRET.encode() not in stored
        assert msgspec.json.decode(stored).startswith("taskqueue-codec zlib+fernet:new ")


async def test_what_is_stored() -> None:
    """U17: the payload is one JSON string, the header names the codecs and the key, and nothing shows the content."""
    vault = Vault()
    async with connect("taskqueue_memory") as queue:
        task = await vault.charge.call(SECRET).task(queue)
        again = await vault.charge.call(SECRET).task(queue)
    assert isinstance(task.value(), str)
    assert task.headers[CODEC_HEADER] == "zlib+fernet:new"
    assert SECRET.encode() not in task.payload
    assert task.payload != again.payload
    assert task.content_digest is not None
    assert len(task.content_digest) == 32
    assert task.content_digest != again.content_digest, "equal contents show"
    assert vault.charge.read(task) == {"card": SECRET}


async def test_an_honest_repetition_is_a_duplicate(world: OpenWorld) -> None:
    """Law 7: the same task encrypted again is a duplicate, before and after it has run; other arguments conflict."""
    vault = Vault()
    async with world() as it, connect(it.backend) as queue, vault.tasks.connect(queue):
        charge = vault.charge.using(id="once")
        assert _status_of(await charge.publish(SECRET)) is Published.ACCEPTED
        assert _status_of(await charge.publish(SECRET)) is Published.DUPLICATE
        async with working(it.worker(vault.tasks)):
            assert await (await charge.publish(SECRET)).result(10) == f"{SECRET} pays 5"
        assert _status_of(await charge.publish(SECRET)) is Published.DUPLICATE
        handles = await vault.tasks.publish_many([charge.call(SECRET), charge.call("card-1")])
        assert [*map(_status_of, handles)] == [Published.DUPLICATE, Published.CONFLICT]


def _status_of(handle: Handle[Any]) -> Published | None:
    return None if handle.confirmation is None else handle.confirmation.status


async def test_errors(world: OpenWorld, caplog: pytest.LogCaptureFixture) -> None:
    """U17: of an error, only the type is stored in the clear, and no traceback; the publisher reads the whole text."""
    vault = Vault()
    caplog.set_level(logging.INFO)
    async with world() as it, connect(it.backend) as queue, vault.tasks.connect(queue):
        await vault.tasks.apply()
        async with working(it.worker(vault.tasks)):
            for how, reason, text in (
                ("raise", "max_retries_exceeded", f"LookupError: {SECRET} is unknown"),
                ("reject", "no_money", f"{SECRET} is empty"),
                ("retry", "max_retries_exceeded", f"{SECRET} is busy"),
            ):
                handle = await vault.fail.publish(SECRET, how)
                with pytest.raises(TaskDead) as caught:
                    await handle.result(10)
                assert (caught.value.reason, caught.value.error) == (reason, text)
                assert caught.value.traceback is None
                status = await handle.status()
                assert status is not None
                assert status.last_failure is not None
                assert status.last_failure.error == text
        stored = await _everything(it.backend, "vault.fail")
    assert SECRET.encode() not in stored
    assert b"LookupError: taskqueue-codec zlib+fernet:new " in stored
    assert not [record for record in caplog.records if "taskqueue-codec " in record.getMessage()]


def test_error_texts_fit() -> None:
    """A long message is cut before it is encoded, so that the text fits the limit and can be decoded."""
    from taskqueue_core.application.encoding import Encoding, readable_error  # noqa: PLC0415

    encoding = Encoding(Fernet(keys=[NEW]))
    for message in ("x" * 10_000, "\N{PILE OF POO}" * 4000, "\ud800" * 3000):
        text = encoding.error_of("E" * 500, message)
        assert len(text) <= LIMITS.text
        kind, _, plain = readable_error(encoding, text).partition(": ")
        assert kind == "E" * 200
        assert message.encode("utf-8", "replace").decode().startswith(plain)
        assert len(plain) > 500
    assert encoding.error_of("ValueError", "") == "ValueError"


async def test_unique_keys_are_keyed() -> None:
    """U12, U17: equal arguments have equal unique keys, which nobody without the key can compute."""
    keyed, other, plain, packed = (
        Vault(Fernet(keys=[NEW])),
        Vault(Fernet(keys=[OLD])),
        Vault(Zlib()),
        Tasks(prefix="vault."),
    )

    @packed.task(unique=Unique(by=("card",)))
    async def renew(card: str) -> None: ...

    async with connect("taskqueue_memory") as queue:

        async def key(task: TaskFunction[..., Any]) -> str:
            unique = (await task.call(SECRET).task(queue)).unique
            assert unique is not None
            return unique.key

        assert await key(keyed.renew) == await key(Vault(Fernet(keys=[NEW, OLD])).renew)
        keys = [await key(task) for task in (keyed.renew, other.renew, renew)]
        assert len({*keys}) == 3
        assert await key(plain.renew) == await key(renew), "a codec without keys changes nothing"
    async with TestQueue(keyed.tasks) as taskqueue:
        first, again = await keyed.renew.publish(SECRET), await keyed.renew.publish(SECRET)
        assert again.id == first.id
        await taskqueue.drain()
        assert await again.result() == SECRET


async def test_key_rotation() -> None:
    """U17: the first key encrypts and all decrypt; without its key, nothing is decoded."""
    old, both, turned, new = (
        Vault(Fernet(keys={"old": OLD})),
        Vault(Fernet(keys={"old": OLD, "new": NEW})),
        Vault(Fernet(keys={"new": NEW, "old": OLD})),
        Vault(Fernet(keys={"new": NEW})),
    )
    backend = MemoryBackend()
    async with connect(backend) as queue:
        by_old = await old.charge.using(on=queue, id="t1").publish(SECRET)
        for vault in (old, both, turned):
            async with working(LocalWorker(vault.tasks, backend=backend)):
                handle = vault.charge.using(on=queue).handle(by_old.id)
                assert await handle.result(10) == f"{SECRET} pays 5"
        by_both = await both.charge.using(on=queue, id="t2").publish(SECRET)
        assert by_both.confirmation is not None
        with pytest.raises(IdConflict):  # the digest is that of another key
            await turned.charge.using(on=queue, id="t2").publish(SECRET)
        with pytest.raises(Undecodable, match="'old' is not among the keys new"):
            await new.charge.using(on=queue).handle(by_old.id).result()
        with pytest.raises(Undecodable, match="has no codec"):
            await _plain().using(on=queue).handle(by_old.id).result()


def _plain() -> Any:
    tasks = Tasks(prefix="vault.")

    @tasks.task
    async def charge(card: str, amount: int = 5) -> str:
        return f"{card} pays {amount}"

    return charge


async def test_a_digest_key_outlives_all_keys() -> None:
    """With a digest key, a repetition under entirely different keys is a duplicate."""
    digest_key = Cipher.generate_key()
    async with connect("taskqueue_memory") as queue:
        statuses = [
            _status_of(
                await Vault(Fernet(keys=[key], digest_key=digest_key))
                .charge.using(on=queue, id="t1")
                .publish(SECRET)
            )
            for key in (OLD, NEW)
        ]
    assert statuses == [Published.ACCEPTED, Published.DUPLICATE]


async def test_a_queue_with_plain_tasks() -> None:
    """A codec is introduced while plain tasks are in the queue: they run, and plain results are read."""
    backend, vault = MemoryBackend(), Vault()
    async with connect(backend) as queue, vault.tasks.connect(queue):
        plain = await _plain().using(on=queue).publish(SECRET)
        async with working(LocalWorker(vault.tasks, backend=backend)):
            assert await vault.charge.handle(plain.id).result(10) == f"{SECRET} pays 5"
        await queue.publish("vault.charge", {"card": SECRET}, id="t2")
    other = Vault(Zlib())
    async with connect("taskqueue_memory") as queue:
        task = await other.charge.call(SECRET).task(queue)
        assert vault.charge.read(task) == {"card": SECRET}, (
            "a chain decodes what some of it encoded"
        )


async def test_test_queue() -> None:
    """U10, U17: `TestQueue` shows arguments, decodes results and errors, and drains twice, with a codec, too."""
    vault = Vault()
    async with TestQueue(vault.tasks, errors="record") as taskqueue:
        handle = await vault.charge.publish(SECRET)
        failing = await vault.fail.publish(SECRET, "raise")
        taskqueue.assert_published(vault.charge, times=1, card=SECRET, amount=5)
        with pytest.raises(AssertionError, match=r"nearest: vault\.charge"):
            taskqueue.assert_published(vault.charge, card="other")
        drained = await taskqueue.drain(deliver_twice=True)
        assert await handle.result() == f"{SECRET} pays 5"
        with pytest.raises(TaskDead, match=f"{SECRET} is unknown"):
            await failing.result()
        assert all(isinstance(error, LookupError) for error in drained.errors)
        (published,) = taskqueue.published(vault.charge)
        assert published.task.headers[CODEC_HEADER] == "zlib+fernet:new"
        assert await published.handle.result() == f"{SECRET} pays 5"


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
        copied = await _plain().using(headers=dict(task.headers)).call(SECRET).task(queue)
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
