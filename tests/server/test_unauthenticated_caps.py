"""Limits on the number of connections and sockets without a token, and on the log lines that they cause."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_server import logs
from taskqueue_server.auth.quotas import DEFAULT_SOCKETS
from taskqueue_server.context.connections import MAX_CONNECTIONS
from tests.prefect.support import Taker, url_of
from tests.server.access import ADMIN, A, bearer, everybody, guarded
from tests.server.support import Running, eventually, http, running
from tests.server.test_unauthenticated import Streams, head, opened

EACH, ALL = 4, 10
CAPS: dict[str, Any] = {"unauthenticated_per_address": EACH, "unauthenticated_connections": ALL}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tokens file."""
    return everybody(tmp_path / "tokens.toml")


async def ended(streams: Streams) -> bool:
    """Wait until the server closes a connection."""
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(streams[0].read(), 5) == b""
    return True


async def crowd(it: Running, stack: AsyncExitStack, count: int, address: str) -> list[Streams]:
    """Open connections from an address that send nothing, until the server has accepted or refused all."""
    return [await stack.enter_async_context(opened(it, host=address)) for _ in range(count)]


class TestConnections:
    """U26 and fault G11 (A2): connections without a token, from one address and in all."""

    async def test_of_one_address(self, path: Path) -> None:
        """Of 20 connections from one address, 4 are kept; clients at other addresses are not affected."""
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            crowded = await crowd(it, stack, 20, "127.0.0.1")
            await asyncio.gather(*(ended(streams) for streams in crowded[EACH:]))
            assert (len(it.context.unauthenticated), it.context.unauthenticated.largest()) == (4, 4)
            (other,) = await crowd(it, stack, 1, "127.0.0.2")
            other[1].write(head("GET", "/alive"))
            assert (await other[0].readline()).startswith(b"HTTP/1.1 200")

    async def test_in_all(self, path: Path) -> None:
        """Ten connections are kept; a new address gets a place, at the expense of the one that has the most."""
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            crowds = [await crowd(it, stack, EACH, f"127.0.0.{n}") for n in range(1, 4)]
            await asyncio.gather(ended(crowds[0][0]), ended(crowds[2][3]))
            await eventually(lambda: len(it.context.unauthenticated) == ALL)
            (late,) = await crowd(it, stack, 1, "127.0.0.9")
            await ended(crowds[1][0])
            assert len(it.context.unauthenticated) == ALL
            late[1].write(head("GET", "/alive"))
            assert (await late[0].readline()).startswith(b"HTTP/1.1 200")

    @pytest.mark.fast_clock
    async def test_silent_ones_make_room(self, path: Path) -> None:
        """A full address gets a new connection after a second, because a client authenticates in that time."""
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            silent = await crowd(it, stack, EACH, "127.0.0.1")
            await eventually(lambda: len(it.context.unauthenticated) == EACH)
            await asyncio.sleep(1.1)
            async with it.worker("w1", "a", headers=bearer(A)):
                await ended(silent[0])
                assert len(it.context.unauthenticated) == EACH - 1

    async def test_authenticated_ones_do_not_count(self, path: Path) -> None:
        """Sockets and idle connections whose clients have authenticated take no place."""
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            for n in range(2 * ALL):
                await stack.enter_async_context(it.worker(f"w{n}", "a", headers=bearer(A)))
                (streams,) = await crowd(it, stack, 1, "127.0.0.1")
                streams[1].write(head("GET", "/v1/queues", f"Authorization: Bearer {ADMIN}"))
                assert (await streams[0].readline()).startswith(b"HTTP/1.1 200")
            assert len(it.context.unauthenticated) == 0
            assert len(it.context.registry) == 2 * ALL

    async def test_without_authentication(self) -> None:
        """On a server without authentication, a client counts until its first request is complete."""
        async with running(**CAPS) as it, AsyncExitStack() as stack:
            for n in range(2 * ALL):
                await stack.enter_async_context(it.worker(f"w{n}", "a"))
            assert len(it.context.unauthenticated) == 0


async def ask(streams: Streams, client: str) -> bytes:
    """Send half of a login through a proxy, which names the client."""
    form = "Content-Type: application/x-www-form-urlencoded"
    lines = (form, "Content-Length: 100", f"X-Forwarded-For: {client}")
    streams[1].write(head("POST", "/login", *lines) + b"token=")
    return b""


class TestProxies:
    """U26 and fault G11 (A2): the address of a client behind a proxy."""

    async def test_clients_are_counted(self, path: Path) -> None:
        """Connections of a trusted proxy count for the clients that it names, in the last place that it wrote."""
        async with (
            guarded(path, **CAPS | {"trusted_proxies": frozenset({"127.0.0.0/31"})}) as it,
            AsyncExitStack() as stack,
        ):
            proxied = await crowd(it, stack, ALL, "127.0.0.1")
            await eventually(lambda: len(it.context.unauthenticated) == ALL)
            for n, streams in enumerate(proxied):
                await ask(streams, f"made-up, 192.0.2.{n % 2}, 127.0.0.1")
            ends = asyncio.gather(*(ended(streams) for streams in (*proxied[8:],)))
            await ends
            assert len(it.context.unauthenticated) == 2 * EACH
            assert it.context.unauthenticated.largest() == EACH

    async def test_others_are_not_believed(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The header of a client that is not a trusted proxy changes nothing."""
        caplog.set_level(logging.INFO, "taskqueue.access")
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            crowded = await crowd(it, stack, EACH, "127.0.0.1")
            for n, streams in enumerate(crowded):
                await ask(streams, f"192.0.2.{n}")
            async with http(it) as client:
                with contextlib.suppress(Exception):
                    await client.get("/v1/queues", headers={"x-forwarded-for": "192.0.2.9"})
            assert it.context.unauthenticated.largest() <= EACH
        assert "192.0.2" not in str([record.__dict__ for record in caplog.records])

    async def test_the_log_names_the_client(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The peer in the log is the client that the proxy names."""
        proxies = frozenset({"127.0.0.1/32"})
        async with guarded(path, trusted_proxies=proxies) as it, http(it) as client:
            await client.get("/v1/queues", headers={"x-forwarded-for": "192.0.2.9"})
        assert [getattr(record, "peer", None) for record in caplog.records] == ["192.0.2.9"]

    def test_addresses_and_networks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The setting takes addresses and networks, and a wrong one is named."""
        monkeypatch.setenv("TASKQUEUE_TRUSTED_PROXIES", "10.0.0.7, 10.1.2.3/8,::1")
        assert load_settings(Settings).trusted_proxies == {"10.0.0.7/32", "10.0.0.0/8", "::1/128"}
        monkeypatch.setenv("TASKQUEUE_TRUSTED_PROXIES", "proxy.example")
        with pytest.raises(ConfigurationError, match=r"TRUSTED_PROXIES.*addresses or networks"):
            load_settings(Settings)


class TestSockets:
    """U26 and fault G11 (A9): sockets of one kind or one token do not keep out others."""

    async def test_prefect_sockets_without_a_token(self, path: Path) -> None:
        """As many silent Prefect sockets as one address may open do not keep out a worker at another address."""
        async with guarded(path) as it, AsyncExitStack() as stack:
            for _ in range(110):
                taker = Taker(url_of(it), quiet=True)
                await stack.enter_async_context(taker)
            async with it.worker("w1", "a", token=A):
                pass

    async def test_sockets_of_one_token(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A name without a limit of its own has one by default, which leaves room for others."""
        assert DEFAULT_SOCKETS == MAX_CONNECTIONS // 4
        monkeypatch.setattr("taskqueue_server.auth.quotas.DEFAULT_SOCKETS", 2)
        async with guarded(path) as it, AsyncExitStack() as stack:
            for n in range(2):
                await stack.enter_async_context(it.worker(f"w{n}", "a", headers=bearer(A)))
            async with it.socket(additional_headers=bearer(A)) as late:
                await asyncio.wait_for(late.wait_closed(), 5)
                assert (late.close_code, late.close_reason) == (1013, "too_many")
            async with it.worker("w9", "a", headers=bearer(ADMIN)):
                pass


class TestLines:
    """U26 and fault G11 (A2): log lines that clients without a token cause."""

    @pytest.mark.parametrize(
        ("data", "event"),
        [
            (head("GET", "/v1/queues"), "request"),
            (head("GET", "/nowhere"), "request"),
            (b"\x00\r\n\r\n", "Invalid HTTP request received."),
        ],
    )
    async def test_of_one_kind(
        self, path: Path, data: bytes, event: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Of 100 lines 50 are written, and one that counts the others."""
        caplog.set_level(logging.INFO)
        async with guarded(path, log_level="info") as it:
            for _ in range(100):
                assert len(await it.answers(data)) == 1
            known = await it.answers(
                head("GET", "/v1/queues", f"Authorization: Bearer {ADMIN}", "Connection: close")
            )
            assert known == [200]
        strange = [one for one in caplog.records if not hasattr(one, "identity")]
        assert [one.getMessage() for one in strange].count(event) == logs.LINES
        summary: Any
        (summary,) = (one for one in caplog.records if hasattr(one, "left_out"))
        assert (summary.left_out, summary.reason) == (100 - logs.LINES, event)
        assert len([one for one in caplog.records if hasattr(one, "identity")]) == 1

    async def test_of_refused_connections(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Connections beyond the limit are logged as sparingly."""
        async with guarded(path, **CAPS) as it, AsyncExitStack() as stack:
            crowded = await crowd(it, stack, 100, "127.0.0.1")
            await asyncio.gather(*(ended(streams) for streams in crowded[EACH:]))
        lines = [one.getMessage() for one in caplog.records]
        assert sum(line.startswith("connection closed") for line in lines) == logs.LINES
        assert [one.left_out for one in caplog.records if hasattr(one, "left_out")] == [46]

    @pytest.mark.fast_clock
    async def test_a_new_window(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """After ten seconds the count is written, and further lines are too."""
        async with guarded(path) as it:
            for _ in range(2):
                for _ in range(logs.LINES + 5):
                    await it.answers(head("GET", "/v1/queues"))
                await asyncio.sleep(logs.WINDOW_SECONDS)
        left_out: list[Any] = [one for one in caplog.records if hasattr(one, "left_out")]
        assert 1 <= sum(one.left_out for one in left_out) <= 10
        assert re.match("similar lines", left_out[0].getMessage())
