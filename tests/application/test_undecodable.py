"""What cannot be decoded: it is put off, becomes a dead letter, never reaches a handler, and costs bounded memory."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from taskqueue_core import Codec, CodecChain, Fernet, TaskDead, Tasks, Undecodable, Zlib, connect
from taskqueue_core.application.encoding import (
    CODEC_HEADER,
    Encoding,
    decoded_payload,
    decoded_result,
    readable_error,
    shown_in_place,
)
from taskqueue_core.clock import ManualClock
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Worker
from taskqueue_worker.testing import TestQueue
from taskqueue_worker.unknown_tasks import UNDECODABLE_DELAY, UNDECODABLE_SNOOZES
from tests.application.running import working
from tests.application.vault import NEW, OLD, RUNS, SECRET, Vault, plain_charge
from tests.server.support import running

KEY = "vault.charge"


async def _task(vault: Vault, task_id: str = "t1") -> Task:
    async with connect("taskqueue_memory") as queue:
        return await vault.charge.using(id=task_id).call(SECRET).task(queue)


@asynccontextmanager
async def _put_off(tasks: Tasks, task: Task) -> AsyncIterator[tuple[MemoryBackend, Queue]]:
    """Publish a task, let a worker put it off ten times, and check that it is a dead letter then."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    async with connect(backend) as queue:
        await queue.publish_many([task])
        start, attempts = clock.now(), 0
        async with working(LocalWorker(tasks, backend=backend)):
            while (status := await queue.status(task.key, task.id)) is not None:
                if status.state is State.DEAD:
                    break
                if status.state is State.SCHEDULED and status.attempt > attempts:
                    attempts = status.attempt
                    assert (status.error, status.losses) == (None, 0)
                    await clock.advance(UNDECODABLE_DELAY)
                await asyncio.sleep(0.001)
        assert clock.now() - start == UNDECODABLE_SNOOZES * UNDECODABLE_DELAY
        assert attempts == UNDECODABLE_SNOOZES + 1
        record = backend._store.find(task.key, task.id)
        assert record is not None
        assert record.attempt - record.prior == 1, "snoozes counted as attempts"
        yield backend, queue


async def test_a_worker_without_the_key() -> None:
    """U17: it puts the task off by a minute ten times, without an attempt; then it is dead, and a redrive runs it."""
    new = Vault(Fernet(keys={"new": NEW}))
    RUNS.clear()
    task = await _task(new)
    async with _put_off(Vault(Fernet(keys={"old": OLD})).tasks, task) as (backend, queue):
        (letter,) = await backend.dead_letters.list(KEY)
        assert letter.reason == "undecodable"
        assert letter.history[-1].error == (
            "its key 'new' is not among the keys old of this process (fernet)"
        )
        assert RUNS == []
        assert [c.status for c in await queue.publish_many([await _task(new)])] == ["duplicate"]
        assert await backend.dead_letters.redrive(KEY, "t1") == 1
        async with working(LocalWorker(new.tasks, backend=backend)):
            result = await new.charge.using(on=queue).handle("t1").result(10, wait_for_redrive=True)
        assert result == f"{SECRET} pays 5"


async def test_a_worker_without_a_codec() -> None:
    """U17: encoded bytes are never passed to a handler, even if it accepts any text."""
    plain, runs = Tasks(prefix="vault."), list[Any]()

    @plain.task
    def charge(card: Any = None, amount: Any = 5) -> None:
        runs.append((card, amount))

    async with _put_off(plain, await _task(Vault())) as (backend, _):
        (letter,) = await backend.dead_letters.list(KEY)
        assert "the registry has no codec: write Tasks(codec=...)" in letter.history[-1].error
        assert runs == []


async def test_a_rollout_through_a_server() -> None:
    """U17: a task that a worker without the key has put off is run by one that has it, without an attempt."""
    new, old = Vault(Fernet(keys={"new": NEW})), Vault(Fernet(keys={"old": OLD}))
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    async with running(backend) as it, connect(backend) as queue, new.tasks.connect(queue):
        async with working(Worker(old.tasks, url=it.server.url)):
            handle = await new.charge.publish(SECRET)
            while (status := await handle.status()) is not None:
                if status.state is State.SCHEDULED:
                    break
                await asyncio.sleep(0.002)
        await clock.advance(UNDECODABLE_DELAY)
        async with working(Worker(new.tasks, url=it.server.url)):
            assert await handle.result(10) == f"{SECRET} pays 5"
        record = backend._store.find(KEY, handle.id)
        assert record is not None
        assert (record.attempt, record.prior) == (2, 1)


async def test_damaged_tasks() -> None:
    """Each damage of a payload or its header is `Undecodable`, and the error shows no content and no key."""
    vault = Vault(CodecChain(Zlib(above=0), Fernet(keys={"new": NEW})))
    task = await _task(vault)
    text = task.value()
    data = base64.b64decode(text)
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1
        payload = json.encode(base64.b64encode(changed).decode())
        _refused(vault, replace(task, payload=payload))
    for payload in (
        b'""',
        b"null",
        b"{}",
        b"[]",
        b'{"": 1}',
        b'"%%%"',
        json.encode(text[:-4]),
        b"5",
    ):
        _refused(vault, replace(task, payload=payload))
    for header in (
        "fernet:new",
        "zlib",
        "zlib+fernet:old",
        "zlib+fernet",
        "zlib+zlib+fernet:new",
        "+".join(["zlib"] * 1000),
        "os.system",
        "",
        ":",
        "+",
    ):
        _refused(vault, replace(task, headers={**task.headers, CODEC_HEADER: header}))
    swapped = replace(task, payload=(await _task(Vault(Fernet(keys={"new": OLD})))).payload)
    _refused(vault, swapped)


def _refused(vault: Vault, task: Task) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the kind is checked below
        vault.charge.read(task)
    assert type(caught.value).__name__ in ("Undecodable", "InvalidPayload"), task
    assert SECRET not in str(caught.value)
    assert NEW.decode()[:8] not in str(caught.value)


async def test_plain_members_of_an_encoded_payload() -> None:
    """What a schedule adds to an encoded object is read, but cannot replace what is encoded."""
    vault = Vault()
    task = await _task(vault)
    added = replace(task, payload=b'{"":%b,"amount":7}' % task.payload)
    assert vault.charge.read(added) == {"card": SECRET, "amount": 7}
    with pytest.raises(Undecodable, match="both encoded and plain"):
        vault.charge.read(replace(task, payload=b'{"":%b,"card":"mine"}' % task.payload))


def test_names_on_the_wire_are_never_imported() -> None:
    """Security 11: a codec is found among those of the registry, and no module is imported by a header."""
    assert "antigravity" not in sys.modules
    for name in ("antigravity", "antigravity:x", "taskqueue_core.application.codecs.Zlib"):
        with pytest.raises(Undecodable, match="has only the codecs zlib"):
            decoded_payload(Encoding(Zlib()), {CODEC_HEADER: name}, b'"AAAA"')
    assert "antigravity" not in sys.modules


def test_a_bomb_grows_no_memory() -> None:
    """A payload that decompresses to 200 MB is refused, and less than four times the limit is allocated."""
    stream = zlib.compressobj(9)
    chunk = bytes(1_000_000)
    packed = b"\x01" + b"".join(stream.compress(chunk) for _ in range(180)) + stream.flush()
    payload = json.encode(base64.b64encode(packed).decode())
    assert len(payload) <= LIMITS.payload
    del chunk
    tracemalloc.start()
    try:
        with pytest.raises(Undecodable, match="after decompression"):
            decoded_payload(Encoding(Zlib()), {CODEC_HEADER: "zlib"}, payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * LIMITS.decoded


def test_streams_that_are_cut_or_continue() -> None:
    """A zlib stream that is incomplete, or followed by other bytes, is damaged."""
    codec = Zlib(above=0)
    packed = codec.encode(b"x" * 1000)
    assert codec.decode(packed, None) == b"x" * 1000
    for data in (packed[:-1], packed + b"x", b"", b"\x02abc", b"\x01", b"\x01abc", packed[:5]):
        with pytest.raises(Undecodable):
            codec.decode(data, None)
    assert codec.decode(b"\x00", None) == b""


class Broken:
    """A codec of an application that does something wrong."""

    name, key_id = "broken", None

    def __init__(self, decoded: object) -> None:
        self.decoded = decoded

    def encode(self, data: bytes) -> bytes:
        """Return the data."""
        return data

    def decode(self, _data: bytes, key_id: str | None) -> Any:  # noqa: ARG002 - the protocol has it
        """Return something else, or raise an exception."""
        if isinstance(self.decoded, Exception):
            raise self.decoded
        return self.decoded

    def digest(self, data: bytes) -> bytes:
        """Return a digest that is too short."""
        return data[:4]


@pytest.mark.parametrize(
    ("decoded", "why"),
    [
        (None, "returned NoneType"),
        ("text", "returned str"),
        (bytes(LIMITS.decoded + 1), "limit decoded"),
        (ValueError("card-4711"), "raised ValueError"),
    ],
    ids=["nothing", "text", "too-much", "error"],
)
def test_codecs_of_applications(decoded: object, why: str) -> None:
    """A codec that raises an exception or returns no bytes makes a task undecodable, and shows no content."""
    codec: Codec = Broken(decoded)
    with pytest.raises(Undecodable, match=why) as caught:
        decoded_payload(Encoding(codec), {CODEC_HEADER: "broken"}, b'"AAAA"')
    assert SECRET not in str(caught.value)


async def test_a_digest_that_is_too_short() -> None:
    """A codec whose digests are too short is refused at the publish, before anything is stored."""
    vault = Vault(Broken(b""))
    async with TestQueue(vault.tasks) as taskqueue:
        with pytest.raises(ValueError, match="digest of the codec broken"):
            await vault.charge.publish(SECRET)
        assert (await taskqueue.queue.ledger()).published == 0


def test_damaged_results_and_errors() -> None:
    """A damaged result is `Undecodable`; a damaged error shows what encoded it; other texts stay as they are."""
    encoding = Encoding(Fernet(keys={"new": NEW}))
    result = encoding.result(b"5")
    assert decoded_result(encoding, result) == b"5"
    for damaged in (result[:-9] + b'"', result[:-1], b'"taskqueue-codec "', b'"taskqueue-codec x'):
        with pytest.raises(Undecodable):
            decoded_result(encoding, damaged)
    for plain in (b"5", b'"text"', b'"taskqueue-codec"', b"null"):
        assert decoded_result(encoding, plain) == plain
    text = encoding.error_of("ValueError", SECRET)
    assert readable_error(encoding, text) == f"ValueError: {SECRET}"
    assert readable_error(None, text) == "ValueError: encoded (fernet, key new)"
    assert readable_error(encoding, text[:-8]) == "ValueError: encoded (fernet, key new)"
    escape = "taskqueue-codec \x1b[31m+x AAAA"
    assert readable_error(encoding, escape) == escape
    assert shown_in_place(b'"taskqueue-codec a\\u001bb AAAA"') == "encoded (a?u001bb)"
    assert shown_in_place(b'"x"', {CODEC_HEADER: "zlib+fernet:2026-11"}) == (
        "encoded (zlib, fernet, key 2026-11)"
    )


async def test_secrets_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Neither keys nor contents are in the log of a worker that cannot decode a task."""
    caplog.set_level(logging.DEBUG)
    async with _put_off(Vault(Fernet(keys=[OLD])).tasks, await _task(Vault())):
        pass
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "its payload is undecodable: its key 'new' is not among the keys" in text
    for secret in (SECRET, NEW.decode()[:10], OLD.decode()[:10], "taskqueue-codec "):
        assert secret not in text


async def test_a_plain_handle() -> None:
    """A handle of a registry without the codec raises `Undecodable`, and shows what encoded an error."""
    vault, plain = Vault(), plain_charge()
    async with TestQueue(vault.tasks, errors="record") as taskqueue:
        handle, failing = await vault.charge.publish(SECRET), await vault.fail.publish(SECRET, "x")
        await taskqueue.drain()
        with pytest.raises(Undecodable, match=f"the result of task {handle.id} of {KEY}"):
            await plain.using(on=taskqueue.queue).handle(handle.id).result()
        other = Tasks(prefix="vault.")
        fail = other.task("fail")(vault.fail.function)
        with pytest.raises(TaskDead) as caught:
            await fail.using(on=taskqueue.queue).handle(failing.id).result()
        assert caught.value.error == "LookupError: encoded (zlib, fernet, key new)"


async def test_one_of_a_batch() -> None:
    """U17: an undecodable task of a batch is put off alone; the others run together."""
    vault, other = Vault(), Vault(Fernet(keys={"old": OLD}))
    async with TestQueue(vault.tasks) as taskqueue:
        good = await vault.tasks.publish_many(vault.print_all.call([card]) for card in ("ab", "cd"))
        bad = await other.print_all.call(["x"]).task(taskqueue.queue)
        await taskqueue.queue.publish_many([bad])
        await taskqueue.drain()
        assert [await handle.result() for handle in good] == ["ba", "dc"]
        status = await taskqueue.queue.status(bad.key, bad.id)
        assert status is not None
        assert (status.state, status.attempt) == (State.SCHEDULED, 2)


async def test_copies_of_a_fan_out() -> None:
    """U17: copies in other queues are decoded there, and an honest repetition adds none."""
    codec, seen = CodecChain(Zlib(), Fernet(keys=[NEW])), list[str]()
    vault, copies = Vault(codec), Tasks(prefix="copy.", codec=codec)

    async def note(card: str, amount: int = 5) -> int:
        seen.append(card)
        return amount

    one, two = copies.task("one")(note), copies.task("two")(note)
    backend = MemoryBackend()
    async with connect(backend) as queue, vault.tasks.connect(queue):
        bound = {"bound_to": (one.queue, two.queue)}
        await change_settings(backend.control, KEY, lambda old: old.model_copy(update=bound))
        for status in ("accepted", "duplicate"):
            handle = await vault.charge.using(id="t1").publish(SECRET, amount=7)
            assert handle.confirmation is not None
            assert handle.confirmation.status == status
        async with working(LocalWorker(copies, backend=backend)):
            for task in (one, two):
                assert await task.using(on=queue).handle("t1").result(10) == 7
    assert seen == [SECRET] * 2
