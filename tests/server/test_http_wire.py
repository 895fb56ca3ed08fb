"""HTTP at byte level: malformed requests, slow or endless bodies, pipelining, and numbers at their limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import msgspec
import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_memory import MemoryBackend
from taskqueue_server.routing import bodies
from tests.server.support import http, problem, running
from tests.server.test_abuse import memory

_PLAIN = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n"
_HEAD = b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MB = 1 << 20
_BODY = b'{"key":"k","id":"a"}'
_OK = _PLAIN + b"\r\n"
_LAST = _PLAIN + b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (_HEAD + b"content-length: 10\r\n\r\n" + _BODY, [400, 400]),
        (_HEAD + b"content-length: -1\r\n\r\n" + _BODY, [400]),
        (_HEAD + b"content-length: 1e3\r\n\r\n" + _BODY, [400]),
        (_HEAD + b"content-length: 20\r\ncontent-length: 10\r\n\r\n" + _BODY, [400]),
        (_HEAD + b"content-length: %d\r\n\r\n" % (LIMITS.body + 1), [413]),
        (_HEAD + b"content-length: 99999999999999999999\r\n\r\n" + _BODY, [413]),
        (_HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", [400]),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", [400]),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n", [400]),
        (_HEAD + b"transfer-encoding: gzip\r\n\r\n" + _BODY, [501, 400]),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + _BODY, [413, 400]),
        (b"GET /ready HTTP/1.1\r\n\r\n", [400, 421]),
        (b"\x00\x01\x02\r\n\r\n", [400]),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", [400, 431]),
        (b"GET /v1/socket HTTP/1.1\r\nauthorization: Bearer " + b"a" * MB, [400, 431]),
    ],
    ids=lambda value: value[:70].decode("latin-1") if isinstance(value, bytes) else "",
)
async def test_malformed_requests(request_: bytes, expected: list[int]) -> None:
    """Faults K1 and K5: a malformed request gets an error status or no response, and stores nothing.

    Other clients are still served.
    """
    async with running() as it:
        found = await it.answers(request_, patience=0.2)
        assert set(found) <= set(expected)
        assert (await it.ledger()).published == 0
        assert await it.answers(_LAST) == [200]


async def test_a_body_that_ends_early() -> None:
    """Fault K5: a request whose body ends too early publishes nothing."""
    half = _HEAD + b"content-length: 99\r\n\r\n" + _BODY
    async with running() as it:
        assert await it.answers(half, end=True) in ([], [400])
        assert (await it.ledger()).published == 0


@pytest.mark.fast_clock
async def test_a_slow_body() -> None:
    """Fault K5: a body that is not complete within the time limit gets 408, and the connection is closed.

    This holds even if bytes keep arriving.
    """
    async with running() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(_HEAD + b"content-length: 1000\r\n\r\n")
        said = asyncio.create_task(reader.readuntil(b"}"))
        async with asyncio.timeout(bodies.BODY_SECONDS + 2):
            while not said.done():
                writer.write(b" ")
                await asyncio.wait([said], timeout=1)
            assert b"408" in said.result()
            assert b'"too_slow"' in said.result()
            # the server may have closed the connection before the last bytes were sent
            with contextlib.suppress(ConnectionResetError):
                assert not await reader.read()
        writer.close()


async def test_a_bomb_in_chunks() -> None:
    """Fault K5: a chunked body without an end is refused at the size limit, and its bytes are not kept in memory."""
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 65536

    async with running() as it, http(it, timeout=20) as client:
        begun = memory()
        headers = {"content-type": "application/json"}
        try:
            answer = await client.post("/v1/tasks", content=body(), headers=headers)
        except (httpx2.WriteError, httpx2.ReadError):
            pass  # the server may close the connection before the client has sent everything
        else:
            problem(answer, 413, "too_large")
        assert sent * 65536 < 4 * LIMITS.body
        assert memory() - begun < 3 * LIMITS.body
        assert await it.answers(_LAST) == [200]


async def test_pipelined() -> None:
    """Fault K5: pipelined requests are answered in order; a malformed one does not affect those before it."""
    post = _HEAD + b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY
    async with running() as it:
        assert await it.answers(_OK * 20 + _LAST) == [200] * 21
        found = await it.answers(post + post + _OK + b"nonsense\r\n\r\n")
        assert found == [201, 200, 200, 400]
        assert (await it.ledger()).published == 1


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/jsonx", "application/x-ndjson", "application/xml", "json"],
)
async def test_wrong_types(api: httpx2.AsyncClient, kind: str) -> None:
    """Fault K5: a body with the wrong content type is refused without being parsed."""
    for method, url in (
        ("POST", "/v1/tasks"),
        ("POST", "/v1/tasks/k/a/retry"),
        ("PUT", "/v1/queues/k/settings"),
        ("POST", "/v1/queues/k/dead-letters/redrive"),
    ):
        answer = await api.request(method, url, content=_BODY, headers={"content-type": kind})
        problem(answer, 415, "content_type")


_NUMBERS = (
    "[9223372036854775807,9223372036854775808,-9223372036854775809,1e308,5e-324,-0.0,0.1,1E5,"
    "123456789012345678901234567890]"
)


@pytest.mark.parametrize(
    "payload",
    [
        _NUMBERS,
        '"\\u0000\\ud83d\\ude00\\"\\\\"',
        '{"a":1,"a":2,"":null}',
        "[" * LIMITS.depth + "]" * LIMITS.depth,
    ],
)
async def test_payloads_are_kept_as_they_are(
    api: httpx2.AsyncClient, backend: MemoryBackend, payload: str
) -> None:
    """Fault K3: payloads with large numbers, escapes, repeated keys or deep nesting are stored byte for byte."""
    body = b'{"key":"k","id":"a","payload":' + payload.encode() + b"}"
    headers = {"content-type": "application/json"}
    assert (await api.post("/v1/tasks", content=body, headers=headers)).status_code == 201
    (delivery,) = (await backend.subscribe(["k"], "w").receive(1, 0)).deliveries
    assert delivery.task.payload == payload.encode()


@pytest.mark.parametrize(
    "field",
    ["priority", "delay", "expires_in", "deadline", "not_before", "max_attempts"],
)
@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e400", "-1", "1e300", "253402300800", "9223372036854775808"],
)
async def test_numbers_that_are_none(
    api: httpx2.AsyncClient, backend: MemoryBackend, field: str, number: str
) -> None:
    """Fault K4: a number that is NaN, infinite, negative or too large is refused, and nothing is stored."""
    body = b'{"key":"k","%s":%s}' % (field.encode(), number.encode())
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/tasks", content=body, headers=headers)
    assert answer.status_code == (400 if "N" in number or "I" in number else 422), answer.text
    told = msgspec.json.decode(answer.content)
    assert told["code"] in {"not_json", "invalid_input"}
    assert told["code"] == "not_json" or told["field"] == field
    assert (await backend.control.ledger("k")).published == 0
