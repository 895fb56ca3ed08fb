"""TLS to Redis: files that are replaced, client certificates, options for verification, and a server that is silent."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from rich.console import Console
from rich.pretty import pretty_repr
from rich.traceback import Traceback

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import StoreAddress
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.failures import Misconfigured, NotReached
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import until
from tests.redis.conftest import MakeServer
from tests.redis.links import KEY, linked, settings_for
from tests.redis.servers import RedisServer
from tests.redis.test_addresses import tls_context

SECRET = "canary-5up3r"


def server_context(authority: trustme.CA) -> ssl.SSLContext:
    """Return the TLS context of a server, with a certificate of ``authority``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


def write_client_files(
    authority: trustme.CA, folder: Path, password: bytes = b""
) -> dict[str, Path]:
    """Write a client certificate and its key, which may be encrypted; return the settings."""
    cert, key = folder / "client.pem", folder / "client.key"
    issued = authority.issue_cert("client")
    issued.cert_chain_pems[0].write_to_path(cert)
    secret = load_pem_private_key(issued.private_key_pem.bytes(), None)
    if password:
        encrypted = BestAvailableEncryption(password)
        key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encrypted))
    else:
        issued.private_key_pem.write_to_path(key)
    return {"tls_cert_file": cert, "tls_key_file": key}


@asynccontextmanager
async def rotating(
    port: int, **more: Any
) -> AsyncIterator[tuple[FaultProxy, ssl.SSLContext, RedisClient, trustme.CA]]:
    """Open a TLS terminator whose context can change, and a link to it; yield both and the authority."""
    authority = trustme.CA()
    context = server_context(authority)
    ca_file = more.pop("folder") / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    async with FaultProxy(("127.0.0.1", port), tls=context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.address[1]}{more.pop('options', '')}"
        async with linked(url, tls_ca_file=ca_file, operation_timeout=30, **more) as link:
            yield proxy, context, link, authority


async def test_an_authority_that_is_replaced(redis_server: RedisServer, tmp_path: Path) -> None:
    """U28: the file of authorities is read for each connection; until it follows, a new certificate is an outage."""
    async with rotating(redis_server.port, folder=tmp_path) as (proxy, context, link, _):
        assert await link.command(KEY, "PING") == b"PONG"
        link.started = True
        second = trustme.CA()
        second.issue_cert("127.0.0.1").configure_cert(context)
        proxy.cut()
        waiting = asyncio.create_task(link.command(KEY, "PING"))
        await until(
            lambda: "not trusted" in (link.trouble.text or ""), "the certificate is refused"
        )
        (tmp_path / "ca.pem").write_text("half a file")
        await until(
            lambda: "cannot be used" in (link.trouble.text or ""), "the damaged file is seen"
        )
        second.cert_pem.write_to_path(tmp_path / "ca.pem")
        assert await waiting == b"PONG"
        assert link.trouble.text is None


async def test_a_client_certificate_that_is_replaced(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """U28: the client's certificate and its encrypted key are read for each connection."""
    clients = trustme.CA()
    files = write_client_files(clients, tmp_path, SECRET.encode())
    options = f"?ssl_password={SECRET}"
    async with rotating(redis_server.port, folder=tmp_path, options=options, **files) as opened:
        proxy, context, link, _ = opened
        context.verify_mode = ssl.CERT_REQUIRED
        clients.configure_trust(context)
        assert await link.command(KEY, "PING") == b"PONG"
        link.started = True
        before = files["tls_cert_file"].read_bytes()
        write_client_files(clients, tmp_path, SECRET.encode())
        assert files["tls_cert_file"].read_bytes() != before
        files["tls_key_file"].rename(tmp_path / "later")
        proxy.cut()
        waiting = asyncio.create_task(link.command(KEY, "PING"))
        await until(lambda: "cannot be used" in (link.trouble.text or ""), "the key is missing")
        (tmp_path / "later").rename(files["tls_key_file"])
        assert await waiting == b"PONG"


async def test_an_encrypted_key_without_its_password(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """U28: an encrypted key without a password, or with a wrong one, is an error at once, and nothing asks for it."""
    files = write_client_files(trustme.CA(), tmp_path, SECRET.encode())
    for options in ("", "?ssl_password=wrong"):
        async with rotating(redis_server.port, folder=tmp_path, options=options, **files) as (
            *_,
            link,
            _,
        ):
            with pytest.raises(Misconfigured, match="ssl_password"):
                await link.command(KEY, "PING")


def test_flags_for_verification() -> None:
    """U28: options of the URL change the verification, for authorities that Python 3.13 refuses."""
    url = "rediss://127.0.0.1?ssl_exclude_verify_flags=VERIFY_X509_STRICT"
    strict = ssl.create_default_context().verify_flags
    assert tls_context(url=url).verify_flags == strict & ~ssl.VERIFY_X509_STRICT
    url = "rediss://127.0.0.1?ssl_include_verify_flags=VERIFY_CRL_CHECK_LEAF"
    assert tls_context(url=url).verify_flags == strict | ssl.VERIFY_CRL_CHECK_LEAF
    with pytest.raises(ConfigurationError, match="invalid value of the option"):
        settings_for("rediss://127.0.0.1?ssl_include_verify_flags=NONE")


def test_unknown_ciphers() -> None:
    """U28: the error names the option, not the files of certificates."""
    with pytest.raises(ConfigurationError, match="ssl_ciphers"):
        tls_context(url="rediss://127.0.0.1?ssl_ciphers=none")


@pytest.mark.parametrize("handshake", [False, True])
async def test_a_silent_server(handshake: bool) -> None:  # noqa: FBT001
    """U28: attempts to connect to a server that does not answer, with or without TLS, leave no socket open."""
    writers: set[asyncio.StreamWriter] = set()
    opened = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        writers.add(writer)
        opened += 1
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        finally:
            writers.discard(writer)
            writer.transport.abort()

    context = server_context(trustme.CA()) if handshake else None
    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context)
    url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    limits = {
        "connect_timeout": 0.2,
        "operation_timeout": 2,
        "dangerously_skip_tls_verification": True,
    }
    try:
        async with linked(url, **limits) as link:
            with pytest.raises(NotReached):
                await link.command(KEY, "PING")
            await until(lambda: not writers, "every socket is closed")
            assert opened > 1
    finally:
        server.close()
        await server.wait_closed()


async def test_secrets_are_in_no_representation(make_server: MakeServer) -> None:
    """U28: no representation of settings and addresses shows a secret, nor does the traceback of an error."""
    urls = [
        f"rediss://user:{SECRET}@h?ssl_password={SECRET}",
        f"redis+sentinel://:{SECRET}@127.0.0.1/main",
    ]
    for url in urls:
        address = StoreAddress.of(url)
        settings = settings_for(url, allow_plaintext=True)
        assert (
            SECRET not in f"{pretty_repr(address)} {pretty_repr(settings)} {address!r} {settings!r}"
        )
    server = make_server(config={"requirepass": "another"}).start()
    async with linked(f"redis://:{SECRET}@127.0.0.1:{server.port}") as link:
        with pytest.raises(Misconfigured) as caught:
            await link.command(KEY, "PING")
        shown, trace = io.StringIO(), caught.value.__traceback__
        while trace is not None and trace.tb_frame.f_globals["__name__"].startswith("tests"):
            trace = trace.tb_next
        found = Traceback.from_exception(caught.type, caught.value, trace, show_locals=True)
        Console(file=shown, width=200).print(found)
    assert "Misconfigured" in shown.getvalue()
    assert SECRET not in shown.getvalue()
