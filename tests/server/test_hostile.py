"""Frames that violate the protocol, over real sockets against a server in a separate process.

``TASKQUEUE_FUZZ_FRAMES`` sets the number of random frames. To repeat a run, set ``TASKQUEUE_FUZZ_SEED`` to the seed
that it printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import secrets
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from taskqueue_core.limits import LIMITS
from tests.server.noise import Noise
from tests.server.observed import Observed, eventually_connected, observed
from tests.server.rude import BINARY, CLOSE, CONT, PING, TEXT, RawSocket, frame
from tests.server.support import Worker, receipts

FRAMES = int(os.environ.get("TASKQUEUE_FUZZ_FRAMES", "5000"))
MB = 1 << 20


MALFORMED: dict[str, tuple[bytes, int | None]] = {
    # name: bytes to send, and the close code expected from the server
    "bad UTF-8": (frame(b'{"type":"\xff\xfe"}'), 1007),
    "bad UTF-8 and a close": (frame(b"\xff") + frame((1000).to_bytes(2, "big"), CLOSE), 1000),
    "half of a character": (frame(b'{"type":"\xc3'), 1007),
    "a binary message": (frame(b'{"type":"ping"}', BINARY), 4400),
    "nothing": (frame(b""), 4400),
    "an array": (frame(b"[1]"), 4400),
    "a number": (frame(b"12"), 4400),
    "NaN": (frame(b'{"type":"ping","n":NaN}'), 4400),
    "Infinity": (frame(b'{"type":"progress","receipt":"r","value":Infinity}'), 4400),
    "1e999": (frame(b'{"type":"credit","n":1e999}'), 4400),
    "a depth of 10,000": (frame(b'{"type":"ping","x":' + b"[" * 10_000), 4400),
    "a missing field": (frame(b'{"type":"ack"}'), 4400),
    "a wrong type": (frame(b'{"type":"credit","n":"7"}'), 4400),
    "no type": (frame(b'{"n":7}'), 4400),
    "a null byte": (frame(b'{"type":"credit\0","n":7'), 4400),
    "a lone surrogate": (frame(b'{"type":"dead_letter","receipt":"r","reason":"\\ud800"}'), 4400),
    "a receipt of 65 kB": (frame(b'{"type":"ack","receipts":["%b"]}' % (b"x" * 65_000)), 4400),
    "credit beyond the limit": (frame(b'{"type":"credit","n":10001}'), 4400),
    "a second hello": (frame(b'{"type":"hello","worker_id":"w","keys":["k"]}'), 4400),
    "one byte too many": (frame(b'"' + b"x" * LIMITS.frame), 1009),
    "one byte too many in fragments": (
        frame(b"x" * LIMITS.frame, fin=False) + frame(b"x", CONT),
        1009,
    ),
    "fragments of nothing": (frame(b"{", fin=False) + 2000 * frame(b"", CONT, fin=False), None),
    "16 MiB": (frame(bytes(16 * MB))[: LIMITS.frame], 1009),
    "1 GiB declared": (b"\x81\xff" + (1 << 30).to_bytes(8, "big") + bytes(4), 1009),
    "a length beyond 63 bits": (b"\x81\xff" + b"\xff" * 8 + bytes(4), 1009),
    "compressed without leave": (b"\xc1" + frame(b"\x00" * 100)[1:], 1002),
    "a frame without a mask": (b"\x81\x02{}", 1002),
    "an unknown opcode": (frame(b"", 3), 1002),
    "a ping of 126 bytes": (frame(b"p" * 126, PING), 1002),
    "a ping in fragments": (frame(b"p", PING, fin=False), 1002),
    "a continuation of nothing": (frame(b"x", CONT), 1002),
    "a message within a message": (frame(b"{", TEXT, fin=False) + frame(b"{}"), 1002),
    "a close of one byte": (frame(b"x", CLOSE), 1002),
    "a close with a bad code": (frame((999).to_bytes(2, "big"), CLOSE), 1002),
}
HELLOS: dict[str, dict[str, Any]] = {
    "no keys": {"keys": []},
    "10,000 keys": {"keys": [f"k{n}" for n in range(10_000)]},
    "a key with a newline": {"keys": ["a\nb"]},
    "a key that starts with a dot": {"keys": [".."]},
    "a key in braces": {"keys": ["{a}"]},
    "a key with an escape": {"keys": ["\x1b[2J"]},
    "a key of 65 kB": {"keys": ["k" * 65_000]},
    "a key that looks alike": {"keys": ["ке"]},
    "an empty id": {"worker_id": ""},
    "credit below zero": {"credit": -1},
    "holding 10,001": {"holding": ["r"] * 10_001},
    "another version": {"protocol": 99},
}


async def honest(it: Observed, key: str) -> tuple[Worker, list[str]]:
    """Return a well-behaved worker that holds three of five tasks, and the receipts of the three."""
    await it.publish(key, [b"1"] * 5)
    worker = await it.worker("honest", key, credit=3).__aenter__()
    return worker, receipts(await worker.deliveries(3))


async def undisturbed(it: Observed, key: str, worker: Worker, held: list[str]) -> None:
    """Check that the worker still holds its tasks and can settle them."""
    books = await it.ledger(key)
    assert (books.waiting, books.in_flight, books.published) == (2, 3, 5)
    await worker.send("ack", receipts=held)
    assert await worker.settled(3) == (held, [])
    await worker.socket.close()
    assert (await it.ledger(key)).done == 3


async def test_what_is_malformed_is_named_and_harmless() -> None:
    """Faults G8, G9 and G10: each malformed frame gets its close code and a short reason.

    It uses little memory, and its content is never logged unescaped.
    """
    async with observed(lease=20, grace=0.05) as it:
        worker, held = await honest(it, "safe")
        # The first bad frame loads modules, whose memory must not count below.
        with await it.raw("warm") as raw:
            await raw.send(frame(b"{"))
            assert await raw.end() == 4400
        before = await it.look()
        it.forget_peak()
        for name, (data, code) in MALFORMED.items():
            with await it.raw("bad") as raw:
                # The server may close the connection after the frame header, before the client has sent everything.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await raw.send(data)
                assert await raw.end() == code, name
                assert len(raw.reason) <= 123, name
        for name, hello in HELLOS.items():
            with await RawSocket.opened(it.port) as raw:
                said = {"type": "hello", "worker_id": "w", "keys": ["k"], **hello}
                await raw.send(frame(msgspec.json.encode(said)))
                assert await raw.end() == 4400, name
        for _ in range(3):  # The server ignores everything after a close frame.
            with await it.raw("late") as raw:
                bye = frame((1000).to_bytes(2, "big"), CLOSE)
                await raw.send(bye + frame(b'{"type":"credit","n":5}') * 100 + b"\xff" * 1000)
                assert await raw.end() == 1000
        assert it.peak - before.rss < 8 * MB
        await it.settles_to(before, rss=2 * MB)
        await undisturbed(it, "safe", worker, held)
        assert "\x1b" not in it.log
        assert "x" * 100 not in it.log


async def test_sockets_that_say_nothing() -> None:
    """Fault G11: the number of sockets without a hello is limited, and further ones are closed with 1013.

    Connected workers are still served, and no memory accumulates.
    """
    async with observed(lease=20) as it:
        worker, held = await honest(it, "safe")
        before = None
        for _ in range(2):
            idle = [await RawSocket.opened(it.port) for _ in range(150)]
            told = {asyncio.create_task(raw.end()) for raw in idle}
            async with asyncio.timeout(60):
                while len(told) > 100:
                    _, told = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
            assert [raw.closed_with for raw in idle].count(1013) == 50
            await worker.send("ping", n=1)
            await worker.frame("pong")
            assert [raw.closed_with for raw in idle].count(None) == 100
            for reading in told:
                reading.cancel()
            await asyncio.gather(*told, return_exceptions=True)
            for raw in idle:
                raw.close()
            if before is not None:
                await it.settles_to(before, rss=MB)
            else:
                await eventually_connected(it, 1)
                before = await it.look()
        await undisturbed(it, "safe", worker, held)


async def test_no_descriptors_are_left() -> None:
    """Fault G11: without free file descriptors, connected workers are still served and the log stays short.

    New workers can connect as soon as descriptors are free.
    """
    async with observed(lease=20, faultless=False) as it:
        worker, held = await honest(it, "safe")
        free = 20 + (await it.look()).fds
        resource.prlimit(it.pid, resource.RLIMIT_NOFILE, (free, free))
        async with asyncio.TaskGroup() as many, AsyncExitStack() as opened:
            tries = [many.create_task(_tried(it, opened)) for _ in range(40)]
            await worker.send("ping", n=1)
            await worker.frame("pong")
            await asyncio.gather(*tries)
        async with asyncio.timeout(30), it.worker("late", "k"):
            pass
        await undisturbed(it, "safe", worker, held)
        assert it.log.count("out of system resource") in range(1, 200)


async def _tried(it: Observed, opened: AsyncExitStack) -> None:
    with contextlib.suppress(OSError):
        opened.enter_context(await RawSocket.opened(it.port, patience=0.3))


async def test_fuzz_over_sockets() -> None:
    """Fault G9: random frames do not stop the server or change tasks of another worker.

    They leave no memory, tasks or descriptors behind.
    """
    seed = int(os.environ.get("TASKQUEUE_FUZZ_SEED", secrets.randbelow(1 << 31)))
    print(f"seed {seed}, {FRAMES} frames")  # noqa: T201 - shown if the test fails
    async with observed(lease=20, grace=0) as it:
        worker, held = await honest(it, "safe")
        noises = [Noise(it, random.Random(seed + n), held) for n in range(4)]
        await asyncio.gather(*(noise.make(200) for noise in noises))
        before = await it.look()
        left = FRAMES
        while left > 0:
            share = min(left, 20_000)
            calm = asyncio.create_task(_answer(worker))
            await asyncio.gather(*(noise.make(share // len(noises)) for noise in noises))
            calm.cancel()
            await asyncio.gather(calm, return_exceptions=True)
            left -= share
            assert it.alive
            assert not it.trouble, it.trouble[:3]
            await it.settles_to(before, rss=12 * MB)
        assert sum(noise.sent for noise in noises) >= FRAMES
        await undisturbed(it, "safe", worker, held)


async def _answer(worker: Worker) -> None:
    """Answer pings, and fail if a receipt of this worker is revoked or settled by another peer."""
    await worker.frame("revoke", "settled", seconds=3600)
    raise AssertionError("another peer settled a delivery of this worker")
