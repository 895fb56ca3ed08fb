"""Tests of host names of GPU servers: each connection goes to an address that was resolved and checked for it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.capabilities import slots_of
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.answers import Done, EndpointUnreachable
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_dispatch.outbound_http.dns import CachedLookup, NameUnknown, NotReached
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_memory import MemoryBackend
from tests.dispatch.gpu_support import (
    SYNC,
    Trap,
    endpoint_of,
    lease_of,
    response,
    said,
    task_of,
    trap,
)
from tests.dispatch.keepers import is_healthy, running
from tests.dispatch.patience import PATIENCE, until
from tests.server.tls import Files, make_files

WELL = said(status="success", result=1, active_jobs=0)
ONCE = response(200, b'{"status": "success", "result": 1, "active_jobs": 0}', "connection: close")
"""closes the connection, so that the next call opens a new one"""
NAME = "gpu.inside.example"
NETWORKS = ("127.0.0.1/32", "127.0.0.3/32", "::1/128")
ELSEWHERE = "127.0.0.2"
GONE = EndpointUnreachable("the server's host name has an address that is not allowed", sent=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return paths of valid and invalid certificates."""
    return make_files(tmp_path_factory.mktemp("tls"))


class Names:
    """An untrusted name service, with a clock for the cache of its answers."""

    def __init__(self, *addresses: str) -> None:
        """Resolve every name to these addresses."""
        self.addresses = addresses
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.now = 0.0

    async def resolve(self, host: str, _port: int) -> tuple[str, ...]:
        """Return the current addresses, or raise the error."""
        self.asked.append(host)
        if self.error is not None:
            raise self.error
        return self.addresses

    def lead(self, *addresses: str) -> None:
        """Resolve every name to these addresses from now on, and let cached answers expire."""
        self.addresses = addresses
        self.now += 60


@asynccontextmanager
async def calling(
    names: Names,
    *,
    tls_ca: Path | None = None,
    allowed: tuple[str, ...] = NETWORKS,
    **values: Any,
) -> AsyncIterator[EndpointClient]:
    """Yield an endpoint client that uses this name service."""
    settings = DispatchSettings(_env_file=None, endpoints_allowed=allowed, **values)
    caller = EndpointClient(settings, tls_ca=tls_ca, resolve=names.resolve)
    caller._transports._lookup = CachedLookup(names.resolve, lambda: names.now, failures=0.5)
    try:
        yield caller
    finally:
        await caller.aclose()


@asynccontextmanager
async def beside(server: Trap, host: str = ELSEWHERE) -> AsyncIterator[Trap]:
    """Run another server at the same port of another address."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ONCE)

    it = Trap(answer, "http")
    listener = await asyncio.start_server(it.accept, host, server.port)
    try:
        yield it
    finally:
        listener.close()
        await it.aclose()


def named(server: Trap, name: str = NAME) -> str:
    """Return the server's URL with a host name instead of its address."""
    return server.url.replace("127.0.0.1", name)


async def send(caller: EndpointClient, url: str) -> object:
    """Send a job to the endpoint at this URL."""
    return await caller.send(lease_of(url), task_of(), SYNC, attempt=1)


async def test_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """If a name resolves to a forbidden address after registration, no call connects to it (security 8, C12)."""
    names = Names("127.0.0.1")
    async with trap(ONCE) as server, beside(server) as inner, calling(names) as caller:
        url = named(server)
        assert await send(caller, url) == Done(b"1")
        names.lead(ELSEWHERE)
        with caplog.at_level(logging.WARNING, "taskqueue.dispatch"):
            for _ in range(2):
                assert await send(caller, url) == GONE
                assert await caller.ask(url, "r-1", SYNC) == GONE
                assert await caller.health(endpoint_of(url), SYNC) is None
        (line,) = caplog.records
        assert (line.__dict__["model"], line.__dict__["server"]) == ("flux", "one")
        shown = line.getMessage() + str(line.__dict__)
        assert ELSEWHERE not in shown
        assert NAME not in shown
        assert (server.connections, inner.connections) == (1, 0)
        names.lead("127.0.0.1")
        assert await caller.health(endpoint_of(url), SYNC) is not None, (
            "the name resolves to an allowed address again"
        )
        names.lead(ELSEWHERE)
        assert await send(caller, url) == GONE
        assert len(caplog.records) == 2, "the second refusal is logged too"
        assert inner.connections == 0


async def test_some_elsewhere() -> None:
    """A name with one forbidden address is refused, even if its other addresses are allowed (security 8)."""
    names = Names("127.0.0.1", ELSEWHERE)
    async with trap(WELL) as server, beside(server) as inner, calling(names) as caller:
        assert await send(caller, named(server)) == GONE
        assert (server.connections, inner.connections) == (0, 0)


async def test_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client connects to the address that was checked, whatever the operating system resolves (security 8)."""
    names = Names("127.0.0.1")
    asked: list[object] = []
    loop = asyncio.get_running_loop()
    plain = loop.getaddrinfo

    async def lies(host: object, *rest: object, **more: object) -> object:
        asked.append(host)
        told = ELSEWHERE if host in {NAME, NAME.encode()} else host
        return await plain(told, *rest, **more)  # type: ignore[arg-type] # passed on as it came

    monkeypatch.setattr(loop, "getaddrinfo", lies)
    async with trap(ONCE) as server, beside(server) as inner, calling(names) as caller:
        assert await send(caller, named(server)) == Done(b"1")
        assert (server.connections, inner.connections) == (1, 0)
        assert f"\r\nhost: {NAME}:{server.port}\r\n".encode() in server.requests[0].lower()
    assert NAME not in asked
    assert NAME.encode() not in asked


async def test_tls(files: Files) -> None:
    """The certificate must be valid for the host name, which is sent in SNI, not for the address (security 5, 8)."""
    told: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.good, files.key)  # the certificate is for localhost and 127.0.0.1
    tls.sni_callback = lambda _, name, __: told.append(name)
    names = Names("127.0.0.1")
    async with (
        trap(WELL, tls=tls) as server, calling(names, tls_ca=files.authority) as caller
    ):  # fmt: skip
        for _ in range(3):
            assert await send(caller, named(server, "localhost")) == Done(b"1")
        assert (told, server.connections) == (["localhost"], 1)
        assert f"\r\nhost: localhost:{server.port}\r\n".encode() in server.requests[0].lower()
        wrong = EndpointUnreachable("no connection (SSLCertVerificationError)", sent=False)
        assert await send(caller, named(server)) == wrong
        assert told == ["localhost", NAME]
        assert len(server.requests) == 3


async def test_kept_connections() -> None:
    """A name is resolved once per connection, not per call, and once for simultaneous connections (security 8, C3)."""
    names = Names("127.0.0.1")
    async with trap(WELL) as server, calling(names) as caller:
        url = named(server)
        for _ in range(5):
            assert await send(caller, url) == Done(b"1")
            names.now += 60  # let the cached answer expire
        assert (names.asked, server.connections) == ([NAME], 1)
        names.lead(ELSEWHERE)
        assert await send(caller, url) == Done(b"1"), (
            "the kept connection goes to the checked address"
        )
        assert (names.asked, server.connections) == ([NAME], 1)
        names.lead("127.0.0.1")
        calls = await asyncio.gather(*(send(caller, url) for _ in range(8)))
        assert calls == [Done(b"1")] * 8
        assert names.asked == [NAME] * 2
        assert server.connections > 1


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", ("LocalHost",)),
        ("localhost.", ("localhost",)),
        ("gpu.localhost", ("*.localhost",)),
        ("127.0.0.1", NETWORKS),
    ],
)
async def test_names_that_are_trusted(host: str, allowed: tuple[str, ...]) -> None:
    """A host that the settings name, or an IP address, is called without resolving it (security 8)."""
    names = Names(ELSEWHERE)
    async with trap(ONCE) as server, calling(names, allowed=allowed) as caller:
        url = named(server, host)
        answers = [await send(caller, url) for _ in range(2)]
        if host in {"localhost", "127.0.0.1"}:  # not every system resolves the other names
            assert answers == [Done(b"1")] * 2
        assert not names.asked


async def test_a_server_that_moves() -> None:
    """If a name resolves to another allowed address, the next connection goes there (C12)."""
    names = Names("127.0.0.3")
    async with trap(ONCE) as server, beside(server, "127.0.0.3") as other, calling(names) as caller:
        url = named(server)
        assert await send(caller, url) == Done(b"1")
        names.lead("127.0.0.1")
        assert await send(caller, url) == Done(b"1")
        assert (other.connections, server.connections) == (1, 1)


async def test_several_addresses() -> None:
    """If an address refuses, the next one is tried; the one that worked comes first next time (C12, C23)."""
    names = Names("127.0.0.3", "::1", "127.0.0.1")
    async with trap(ONCE) as server, calling(names) as caller:
        url = named(server)
        assert await send(caller, url) == Done(b"1")
        async with beside(server, "127.0.0.3") as first:
            assert await send(caller, url) == Done(b"1")
            assert (server.connections, first.connections) == (2, 0)
        names.lead("127.0.0.3", "::1")
        answer = await send(caller, url)
        assert answer == EndpointUnreachable("no connection (ConnectionRefusedError)", sent=False)
        assert server.connections == 2


@pytest.mark.parametrize("error", [NameUnknown("x"), NotReached("x"), None])
async def test_names_that_are_not_found(error: Exception | None) -> None:
    """A name that cannot be resolved makes the server unreachable, and is resolved again half a second later (C23)."""
    names = Names()
    names.error = error
    async with trap(ONCE) as server, calling(names) as caller:
        url = named(server)
        for _ in range(2):
            answer = await send(caller, url)
            assert answer == EndpointUnreachable(
                "the server's host name cannot be resolved", sent=False
            )
        assert await caller.health(endpoint_of(url), SYNC) is None
        names.error, names.addresses = None, ("127.0.0.1",)
        names.now += 10 if error is None else 0.6
        assert await send(caller, url) == Done(b"1")
        assert len(names.asked) == 2


async def test_a_look_up_that_hangs() -> None:
    """A cancelled call, or a closed client, leaves no name resolution running (fault H5)."""
    names = Names("127.0.0.1")
    asked = asyncio.Event()

    async def hang(_host: str, _port: int) -> tuple[str, ...]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with trap(ONCE) as server, calling(names) as caller, asyncio.timeout(PATIENCE):
        before = asyncio.all_tasks()
        caller._transports._lookup = CachedLookup(hang)
        calls = [asyncio.create_task(send(caller, named(server))) for _ in range(2)]
        await asked.wait()
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        assert calls[0].cancelled()
        await caller.aclose()
        answer = await calls[1]
        assert answer == EndpointUnreachable(
            "the lookup of the server's host name was cancelled", sent=False
        )
        await until(lambda: asyncio.all_tasks() <= before)


async def test_a_rebound_endpoint_gets_unwell() -> None:
    """An endpoint is unhealthy while its name resolves to a forbidden address (security 8, C22)."""
    names, backend = Names("127.0.0.1"), MemoryBackend()
    async with trap(ONCE) as server, beside(server) as inner, calling(names) as caller:
        settings = DispatchSettings(
            _env_file=None, endpoints_allowed=NETWORKS, health_interval=0.05
        )

        async def told(host: str) -> tuple[str, ...]:
            return await names.resolve(host, 0)

        registry = ModelRegistry(backend, settings, resolve=told)
        await registry.refresh()
        await registry.register("flux", "a", named(server), 1)
        async with running(LeaseRenewer(slots_of(backend), registry, caller, settings)):
            await until(lambda: is_healthy(backend, "a"))
            names.lead(ELSEWHERE)
            await until(lambda: _unwell(backend))
            names.lead("127.0.0.1")
            await until(lambda: is_healthy(backend, "a"))
        assert inner.connections == 0


async def _unwell(backend: MemoryBackend) -> bool:
    return not await is_healthy(backend, "a")
