"""Workers and publishers of a server that requires tokens, and TLS between clients and server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response

from taskqueue_core.client_security import trusting
from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_core.server_address import ServerAddress
from taskqueue_core.tasks import Published, Task
from taskqueue_remote import RemoteBackend
from taskqueue_server.auth.tls import server_context
from taskqueue_worker import Worker, WorkerRefused
from taskqueue_worker.server_connection import open_socket
from tests.server.access import A, B, entry, everybody, write
from tests.server.support import Running, running, settings
from tests.server.tls import Files, make_files
from tests.worker.fake import outcome
from tests.worker.fake import running as working


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file with three tokens."""
    return everybody(tmp_path / "tokens.toml")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Valid and invalid TLS certificates."""
    return make_files(tmp_path_factory.mktemp("tls"))


async def test_a_worker_shows_its_token_before_it_is_connected(path: Path) -> None:
    """Security 1: a worker sends its token in the header.

    It is refused if the token does not grant all keys of its handlers.
    """
    async with running(tokens_file=path) as it:
        assert await publish_and_work(it, it.server.url) == ["t1"]
        other = Worker(url=it.server.url, token=A)

        @other.task("b")
        def run() -> None:
            raise AssertionError

        async with working(other) as ended:
            error = await outcome(ended)
            assert isinstance(error, WorkerRefused)
            assert "forbidden" in str(error)


async def test_a_worker_whose_token_is_revoked(path: Path) -> None:
    """Security 6: a worker whose token is revoked is disconnected, reconnects once, is refused and exits.

    Its task returns to the queue and does not count as lost.
    """
    async with running(tokens_file=path, grace=30) as it:
        worker = Worker(url=it.server.url, token=A)
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        @worker.task("a")
        async def run() -> None:
            loop.call_soon_threadsafe(began.set)
            await asyncio.sleep(60)

        async with working(worker) as ended:
            await it.publish("t1", key="a")
            await asyncio.wait_for(began.wait(), 5)
            write(path, entry(B, keys=["b"]))
            it.context.access.ask_to_reload()
            error = await outcome(ended)
            assert isinstance(error, WorkerRefused)
            assert "HTTP 401" in str(error)
            await it.reaches("a", waiting=1, in_flight=0)


async def publish_and_work(it: Running, url: str, ca: Path | None = None) -> list[str]:
    """Publish a task with the token of key ``a``, run it in a worker, and return the tasks that ran."""
    done: list[str] = []
    remote = RemoteBackend(url, A, tls_ca=ca)
    worker = Worker(url=url, token=A, tls_ca=ca)

    @worker.task("a")
    def run() -> None:
        done.append("t1")

    async with working(worker):
        await remote.publisher.publish(Task(key="a", id="t1"))
        await it.reaches("a", done=1)
    await remote.aclose()
    return done


async def test_another_key_from_afar(path: Path) -> None:
    """Security 2: a publish that the server forbids is refused with the reason, and a forbidden retry is an error."""
    async with running(tokens_file=path) as it:
        remote = RemoteBackend(it.server.url, A)
        (told,) = await remote.publisher.publish(Task(key="b"))
        assert told.status is Published.REFUSED
        assert "lacks the required right (publish) for this key" in (told.reason or "")
        with pytest.raises(
            ConfigurationError, match=r"lacks the required right \(publish\) for this key"
        ):
            await remote.publisher.schedule_retry(Task(key="b"), 1.0)
        assert await remote.control.queues() == ()
        await remote.aclose()
        nobody = RemoteBackend(it.server.url)
        with pytest.raises(ConfigurationError, match="token"):
            await nobody.publisher.publish(Task(key="a"))
        await nobody.aclose()


@pytest.mark.parametrize("token", ["a\nb", "ä", " x", "\x7f"])
def test_a_token_that_no_header_can_carry(token: str) -> None:
    """A token that no HTTP header can carry is refused before anything is sent, and is not shown."""
    with pytest.raises(ConfigurationError) as caught:
        Worker(url="http://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://queue.example", True),
        ("ws://10.1.2.3:8420", True),
        ("https://queue.example", False),
        ("http://127.0.0.1:8420", False),
        ("http://localhost", False),
    ],
)
def test_plain_text(url: str, caplog: pytest.LogCaptureFixture, *, warned: bool) -> None:
    """A client that would send a token unencrypted over the network logs one warning, without the token."""
    RemoteBackend(url, "secret")
    assert caplog.text.count("unencrypted") == warned
    RemoteBackend(url)
    assert caplog.text.count("unencrypted") == warned
    assert "secret" not in caplog.text


async def test_a_redirect_is_not_followed(path: Path) -> None:
    """A client does not follow redirects, because its token is meant for one server only."""
    async with running(tokens_file=path) as it:

        def away(connection: ServerConnection, _: Request) -> Response:
            response = connection.respond(HTTPStatus.TEMPORARY_REDIRECT, "")
            response.headers["Location"] = it.ws
            return response

        async def never(_: ServerConnection) -> None:
            raise AssertionError

        async with serve(never, "127.0.0.1", 0, process_request=away) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(InvalidStatus):
                await open_socket(ServerAddress.of(f"http://127.0.0.1:{port}"), A)
        assert len(it.context.registry) == 0


class TestTls:
    """Security 5: TLS 1.2 or later, and every client verifies the certificate."""

    @asynccontextmanager
    async def secure(self, path: Path, certificate: Path, key: Path) -> AsyncIterator[Running]:
        """Run a server with TLS."""
        async with running(tokens_file=path, tls_certificate=certificate, tls_key=key) as it:
            assert it.server.url.startswith("https://")
            yield it

    async def test_all_clients(self, path: Path, files: Files) -> None:
        """Security 5: a worker and a publisher that trust the certificate authority can connect."""
        async with self.secure(path, files.good, files.key) as it:
            url = it.server.url.replace("127.0.0.1", "localhost")
            assert await publish_and_work(it, url, files.authority) == ["t1"]

    @pytest.mark.parametrize("which", ["self_signed", "expired", "other_host", "unknown_authority"])
    async def test_bad_certificates(
        self, path: Path, files: Files, which: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Security 5: a worker and a publisher refuse a certificate that they cannot trust.

        It is self-signed, expired, issued for another host, or signed by an unknown authority.
        """
        certificate = files.good if which == "unknown_authority" else getattr(files, which)
        ca = None if which == "unknown_authority" else files.authority
        async with self.secure(path, certificate, files.key) as it:
            with pytest.raises(ssl.SSLCertVerificationError):
                await open_socket(ServerAddress.of(it.server.url), A, trusting(ca))
            remote = RemoteBackend(it.server.url, A, tls_ca=ca)
            with pytest.raises(BackendUnavailable, match="no response"):
                await remote.publisher.publish(Task(key="a"))
            await remote.aclose()
            assert (await it.ledger("a")).published == 0
        assert A not in caplog.text

    async def test_old_versions(self, path: Path, files: Files) -> None:
        """Security 5: neither the server nor a client accepts TLS 1.1."""
        trust = trusting(files.authority)
        assert trust is not None
        assert trust.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert trust.verify_mode is ssl.CERT_REQUIRED
        assert trust.check_hostname
        async with self.secure(path, files.good, files.key) as it:
            server = it.server._tls
            assert server is not None
            assert server.minimum_version is ssl.TLSVersion.TLSv1_2

    def test_files_that_are_none(self, path: Path, files: Files, tmp_path: Path) -> None:
        """Security 5: the error about an unusable certificate file names the setting."""
        missing = tmp_path / "missing.pem"
        for given, told in (
            ({"tls_certificate": missing}, "TASKQUEUE_TLS_CERTIFICATE: .*No such file"),
            ({"tls_certificate": path}, "in PEM"),
            ({"tls_certificate": files.good, "tls_key": missing}, "TASKQUEUE_TLS_KEY: "),
            ({"tls_certificate": files.good, "tls_key": files.locked}, "without a password"),
            ({"tls_certificate": files.good, "tls_key": files.other_key}, "KEY_VALUES_MISMATCH"),
            ({"tls_key": files.key}, "requires TASKQUEUE_TLS_CERTIFICATE"),
        ):
            with pytest.raises(ConfigurationError, match=told):
                server_context(settings(**given))
        for bad in (path, missing):
            with pytest.raises(ConfigurationError, match="TASKQUEUE_TLS_CA"):
                trusting(bad)
