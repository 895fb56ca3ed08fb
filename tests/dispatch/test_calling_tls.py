"""Tests of TLS to GPU servers: certificates are always verified."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ssl
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client import exchange
from taskqueue_dispatch.endpoint_client.answers import Done, EndpointUnreachable
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.service import Dispatcher
from taskqueue_memory import MemoryBackend
from tests.dispatch.gpu_support import (
    SYNC,
    calling,
    endpoint_of,
    lease_of,
    response,
    said,
    task_of,
    trap,
)
from tests.dispatch.patience import PATIENCE
from tests.server.tls import Files, make_files

WELL = said(status="success", result=1, active_jobs=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return paths of valid and invalid certificates."""
    return make_files(tmp_path_factory.mktemp("tls"))


def serving(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server's TLS context with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def test_a_good_one(files: Files) -> None:
    """A server with a valid certificate receives jobs, over connections that are kept (security 5, C3)."""
    tls = serving(files.good, files.key)
    async with trap(WELL, tls=tls) as server, calling(tls_ca=files.authority) as caller:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            for _ in range(3):
                sent = await caller.send(lease_of(url), task_of(), SYNC, attempt=1)
                assert sent == Done(b"1")
            assert await caller.ask(url, "r-1", SYNC) == Done(b"1")
            assert await caller.health(endpoint_of(url), SYNC) is not None
        assert server.connections == 2


@pytest.mark.parametrize("kind", ["self_signed", "expired", "other_host"])
async def test_bad_ones(files: Files, kind: str) -> None:
    """A server with a self-signed, expired or wrong-host certificate receives no request (security 5, fault H5)."""
    tls = serving(getattr(files, kind), files.key)
    async with trap(WELL, tls=tls) as server, calling(tls_ca=files.authority) as caller:
        answer = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
        assert answer == EndpointUnreachable("no connection (SSLCertVerificationError)", sent=False)
        assert await caller.ask(server.url, "r-1", SYNC) == answer
        assert await caller.health(endpoint_of(server.url), SYNC) is None
        assert not server.requests


async def test_a_stranger(files: Files) -> None:
    """Without a CA file, only certificates of the system's authorities are accepted (security 5)."""
    async with trap(WELL, tls=serving(files.good, files.key)) as server, calling() as caller:
        answer = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
        assert answer == EndpointUnreachable("no connection (SSLCertVerificationError)", sent=False)
        assert not server.requests


async def test_an_old_protocol(files: Files) -> None:
    """Versions of TLS before 1.2 are refused (security 5)."""
    tls = serving(files.good, files.key)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        tls.maximum_version = ssl.TLSVersion.TLSv1_1
    tls.set_ciphers("ALL:@SECLEVEL=0")
    async with trap(WELL, tls=tls) as server, calling(tls_ca=files.authority) as caller:
        answer = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
        assert isinstance(answer, EndpointUnreachable)
        assert not answer.sent
        assert not server.requests


async def test_no_tls_where_it_is_expected(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server at an https URL that does not speak TLS receives no plain text (security 5)."""
    # client and server both wait for data, so only a timeout ends the call
    monkeypatch.setattr(exchange, "_CONNECT_SECONDS", 0.1)
    async with trap(response(200, b"1")) as server, calling(tls_ca=files.authority) as caller:
        url = server.url.replace("http", "https")
        answer = await caller.send(lease_of(url), task_of(), SYNC, attempt=1)
        assert isinstance(answer, EndpointUnreachable)
        assert not answer.sent


def test_nothing_turns_it_off() -> None:
    """No setting and no argument turns the verification of certificates off (security 5)."""
    names = {*DispatchSettings.model_fields, *inspect.signature(EndpointClient).parameters}
    assert not [name for name in names if "verify" in name or "insecure" in name]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """A CA file that cannot be read raises `ConfigurationError` when the client is created (security 5)."""
    with pytest.raises(ConfigurationError, match="TASKQUEUE_DISPATCH_TLS_CA"):
        EndpointClient(DispatchSettings(_env_file=None), tls_ca=tmp_path / "nothing")


async def test_the_setting(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher verifies servers with the CA file of its settings (security 5)."""
    monkeypatch.setenv("TASKQUEUE_DISPATCH_TLS_CA", str(files.authority))
    async with trap(WELL, tls=serving(files.good, files.key)) as server:
        dispatcher = Dispatcher(MemoryBackend(), DispatchSettings(_env_file=None))
        sent = await dispatcher.caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
        assert sent == Done(b"1")
        await dispatcher.caller.aclose()


async def test_cancelled_on_the_way(files: Files) -> None:
    """If a call is cancelled during a TLS handshake that never ends, its connection is closed (fault H5)."""
    began, ended = asyncio.Event(), asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readexactly(1)
        began.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        async with calling(tls_ca=files.authority) as caller, asyncio.timeout(PATIENCE):
            call = asyncio.create_task(caller.send(lease_of(url), task_of(), SYNC, attempt=1))
            await began.wait()
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            await ended.wait()
    finally:
        server.close()
        for writer in writers:
            writer.close()
