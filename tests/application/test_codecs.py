"""Codecs: what is stored is encoded, and what handlers and publishers see is not."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core import (
    Fernet,
    Handle,
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
from taskqueue_core.errors import IdConflict
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Published
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from taskqueue_worker.testing import TestQueue
from tests.application import encoded_processes
from tests.application.running import OpenWorld, working
from tests.application.vault import NEW, OLD, SECRET, Vault, plain_charge


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
            await plain_charge().using(on=queue).handle(by_old.id).result()


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
        plain = await plain_charge().using(on=queue).publish(SECRET)
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


async def test_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """U17: tasks in child processes are decoded there, and their results and errors are encoded once."""
    monkeypatch.setenv("TEST_PROCESS", str(os.getpid()))
    backend = MemoryBackend()
    async with connect(backend) as queue, encoded_processes.tasks.connect(queue):
        await encoded_processes.tasks.apply()
        async with working(LocalWorker(encoded_processes.tasks, backend=backend)):
            paid = await encoded_processes.pay.publish(SECRET)
            assert await paid.result(30) == (SECRET, True)
            streamed = [event async for event in paid.events(channels=["data"])]
            assert [event.value for event in streamed] == [SECRET]
            with pytest.raises(TaskDead) as caught:
                await (await encoded_processes.fail.publish(SECRET)).result(30)
        assert caught.value.error == f"LookupError: {SECRET} is unknown"
        assert SECRET.encode() not in await _everything(backend, "encoded.fail")
