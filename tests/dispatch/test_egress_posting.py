"""Tests of one callback's POST request: its destination, its content, and faulty receivers."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from importlib import import_module
from pathlib import Path

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.callbacks.sender import policy_of
from taskqueue_dispatch.outbound_http.dns import NotReached, Resolve
from taskqueue_dispatch.outbound_http.post import PostReply, post, trusted
from taskqueue_dispatch.outbound_http.url_policy import Checked, UrlPolicy, check_url
from tests.dispatch.patience import PATIENCE, eventually
from tests.dispatch.receivers import (
    OK,
    Receiver,
    Script,
    answer,
    drip,
    fixed,
    flood,
    hang,
    raw,
    receiving,
    receiving_at,
    settings,
)
from tests.server.tls import Files, make_files

HEAD = b"HTTP/1.1 200 OK\r\n"
NAME = "hooks.example"
NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""trusts no authority, because loading the system's authorities is slow"""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return paths of valid and invalid certificates."""
    return make_files(tmp_path_factory.mktemp("tls"))


def policy(*receivers: Receiver) -> UrlPolicy:
    """Return a policy that allows loopback addresses at the receivers' ports."""
    return policy_of(settings(*receivers))


async def send(
    receiver: Receiver,
    *,
    within: float = PATIENCE,
    scheme: str = "http",
    host: str = NAME,
    tls: ssl.SSLContext | None = None,
    resolve: Resolve | None = None,
    body: bytes = b"{}",
) -> PostReply:
    """Check a URL of the receiver, and send a POST request to it."""
    url = f"{scheme}://{host}:{receiver.port}/a?b=c"
    resolve = resolve or fixed(hooks="127.0.0.1", other="127.0.0.1")
    checked = await check_url(url, policy(receiver), resolve=resolve)
    async with asyncio.timeout(PATIENCE):
        return await post(checked, body, {"webhook-id": "x"}, tls=tls or NOBODY, within=within)


async def test_what_is_sent() -> None:
    """The request has the unchanged body and few headers, none from the environment (OPEN-C7, Security 7)."""
    async with receiving() as receiver:
        assert await send(receiver, body='{"ü": "\u2028"}'.encode()) == PostReply(204, 0)
    (call,) = receiver.calls
    assert call.target == "/a?b=c"
    assert call.body == '{"ü": "\u2028"}'.encode()
    assert call.headers == {
        "host": f"{NAME}:{receiver.port}",
        "accept-encoding": "identity",
        "connection": "close",
        "content-length": str(len(call.body)),
        "webhook-id": "x",
    }


async def test_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are not used (Security 7)."""
    async with receiving() as receiver, receiving() as trap:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{trap.port}")
            monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{trap.port}")
        assert (await send(receiver)).status == 204
    assert (receiver.touched, trap.touched) == (1, 0)


class TestRebinding:
    """A host name whose addresses change between the check and the call (fault I3)."""

    async def test_only_what_was_checked(self) -> None:
        """The name is resolved once, and the call goes to the address that was checked (fault I3)."""
        answers = ["127.0.0.2", "127.0.0.1", "127.0.0.1"]

        async def flips(_host: str, _port: int) -> tuple[str, ...]:
            return (answers.pop(0),)

        async with receiving_at("127.0.0.2", "127.0.0.1") as (good, trap):
            told = UrlPolicy(ports=frozenset({good.port}), http=True, networks=policy().networks)
            checked = await check_url(f"http://{NAME}:{good.port}/", told, resolve=flips)
            assert (await post(checked, b"{}", {}, tls=NOBODY, within=5)).status == 204
        assert (good.touched, trap.touched) == (1, 0)
        assert len(answers) == 2
        assert good.calls[0].headers["host"] == f"{NAME}:{good.port}"

    async def test_the_system_is_not_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the check and the connection the name is not resolved again (fault I3)."""
        asked: list[object] = []
        loop = asyncio.get_running_loop()
        plain = loop.getaddrinfo

        async def hears(host: object, *rest: object, **more: object) -> object:
            asked.append(host)
            return await plain(host, *rest, **more)  # type: ignore[arg-type] # passed on as it came

        monkeypatch.setattr(loop, "getaddrinfo", hears)
        async with receiving() as receiver:
            await send(receiver)
        assert NAME not in asked
        assert NAME.encode() not in asked

    async def test_names_share_no_connection(self) -> None:
        """A connection made for one name is not used for another name with the same address (Security 7)."""
        async with receiving() as receiver:
            await send(receiver, host=NAME)
            await send(receiver, host="other.example")
            await send(receiver, host=NAME)
        assert receiver.touched == 3


class TestAddresses:
    """A host with several addresses."""

    async def test_the_next_one(self) -> None:
        """If an address refuses, the next is tried, but not once a request was sent (OPEN-C7)."""

        async def two(_host: str, _port: int) -> tuple[str, ...]:
            return ("127.0.0.9", "127.0.0.1")

        async with receiving() as receiver:
            assert (await send(receiver, resolve=two)).status == 204
        async with receiving_at("127.0.0.9", "127.0.0.1", raw(b"")) as (first, second):
            with pytest.raises(NotReached):
                await send(first, resolve=two)
        assert (first.touched, second.touched) == (1, 0)

    async def test_not_for_ever(self) -> None:
        """At most three addresses are tried (fault I1)."""

        async def many(_host: str, _port: int) -> tuple[str, ...]:
            return ("127.0.0.7", "127.0.0.8", "127.0.0.9", "127.0.0.1")

        async with receiving() as receiver:
            with pytest.raises(NotReached, match="no connection"):
                await send(receiver, resolve=many)
        assert receiver.touched == 0

    async def test_six(self) -> None:
        """An IPv6 address in a URL is called (OPEN-C7)."""
        async with receiving(host="::1") as receiver:
            told = settings(receiver, callback_networks=("::1/128",))
            url = f"http://[::1]:{receiver.port}/"
            checked = await check_url(url, policy_of(told))
            assert (await post(checked, b"{}", {}, tls=NOBODY, within=5)).status == 204
        assert receiver.calls[0].headers["host"] == f"[::1]:{receiver.port}"


class TestRude:
    """Receivers that violate HTTP or respond slowly (fault I1)."""

    @pytest.mark.parametrize(
        ("script", "error"),
        [
            (raw(b""), "no complete response"),
            (raw(b"HTTP/1.1 200 OK\r\ncontent-le"), "no complete response"),
            (raw(HEAD + b"content-length: 2\r\n"), "no complete response"),
            (raw(b"SSH-2.0-x\r\n\r\n"), "no complete response"),
            (raw(b"\x00" * 10), "no complete response"),
            (raw(b"HTTP/1.1 99999 x\r\n\r\n"), "no complete response"),
            (raw(HEAD + b"content-length: -1\r\n\r\n"), "no complete response"),
            (raw(HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"), "no complete response"),
            (raw(HEAD + b"x: " + b"y" * 200_000 + b"\r\n\r\n"), "no complete response"),
            (hang, "no answer in time"),
            (drip(HEAD, b"a"), "no answer in time"),
            (drip(HEAD, b"x: y\r\n"), "no answer in time"),
            (drip(b"", b"HTTP/1.1 103 Early\r\n\r\n"), "no answer in time"),
        ],
    )
    async def test_no_answer(self, script: Script, error: str) -> None:
        """An invalid or missing response raises one error in time, which contains none of the response (fault I1)."""
        async with receiving(script) as receiver:
            with pytest.raises(NotReached) as caught:
                await send(receiver, within=0.3 if "time" in error else PATIENCE)
        assert str(caught.value) == error

    async def test_a_refused_connection(self) -> None:
        """A refused connection is distinguished from a lost answer (fault I1)."""
        async with receiving() as receiver:
            pass
        with pytest.raises(NotReached, match="no connection"):
            await send(receiver)

    @pytest.mark.parametrize("status", [200, 500])
    async def test_an_endless_answer(self, status: int) -> None:
        """Of a response of 1 GB only 64 KiB are read, because the status alone decides (Security 12, fault I1)."""
        sent: list[int] = []
        async with receiving(flood(status, sent)) as receiver:
            assert await send(receiver) == PostReply(status, 65_536)
        assert sum(sent) < 50_000_000

    @pytest.mark.parametrize(
        ("script", "length"),
        [
            (drip(HEAD + b"content-length: 9999\r\n\r\n"), None),
            (drip(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"), None),
            (raw(HEAD + b"content-length: 9999\r\n\r\nabc"), 3),
            (raw(HEAD + b"transfer-encoding: chunked\r\n\r\nno chunk"), 0),
            (answer(200, b"x" * 1000, content_encoding="gzip"), 1000),
            (answer(200, b"x" * 65_536), 65_536),
            (answer(200, b"x" * 65_537), 65_536),
        ],
    )
    async def test_a_body_that_never_ends(
        self, script: Script, length: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A complete status line counts; a body is waited for only briefly, and never unpacked (fault I1)."""
        monkeypatch.setattr(
            import_module("taskqueue_dispatch.outbound_http.post"), "_BODY_SECONDS", 0.2
        )
        async with receiving(script) as receiver:
            reply = await send(receiver, within=2 * PATIENCE)
        assert reply.status == 200
        assert length in {None, reply.length}

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_elsewhere(self, status: int) -> None:
        """A redirect is returned like any other response, and its target is not called (Security 7, fault I1)."""
        async with receiving() as trap:
            away = answer(status, location=f"http://127.0.0.1:{trap.port}/latest/meta-data/")
            async with receiving(away) as receiver:
                assert (await send(receiver)).status == status
            assert receiver.touched == 1
        assert trap.touched == 0

    async def test_cancelled(self) -> None:
        """A cancelled call closes its connection (fault I1)."""
        async with receiving(hang) as receiver:
            task = asyncio.create_task(send(receiver))
            await eventually(lambda: receiver.calls)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: not receiver.open)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("0", 0, 0),
        ("120", 120, 120),
        (lambda: formatdate(time.time() + 60, usegmt=True), 50, 61),
        (lambda: formatdate(time.time() - 60, usegmt=True), 0, 0),
        ("999999999", 999_999_999, 999_999_999),
        *((text, None, None) for text in ("", "soon", "-5", "1e3", "9" * 400, "٣", "Mon, 99")),
    ],
)
async def test_retry_after(
    text: str | Callable[[], str], least: float | None, most: float | None
) -> None:
    """Retry-After may be seconds or a date; any other value is ignored (fault I1)."""
    told = (text if isinstance(text, str) else text()).encode()
    script = raw(b"HTTP/1.1 429 x\r\ncontent-length: 0\r\nretry-after: " + told + b"\r\n\r\n")
    async with receiving(script) as receiver:
        after = (await send(receiver)).retry_after
    if least is None or most is None:
        assert after is None
    else:
        assert after is not None
        assert least <= after <= most


class TestTls:
    """Certificates (Security 5, fault I1)."""

    @staticmethod
    def server(files: Files, certificate: Path) -> ssl.SSLContext:
        """Return the receiver's TLS context with this certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, files.key)
        return context

    @staticmethod
    def client(files: Files) -> ssl.SSLContext:
        """Return the sender's TLS context, which trusts the tests' authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = trusted().minimum_version
        context.load_verify_locations(files.authority)
        return context

    async def test_the_name(self, files: Files) -> None:
        """The certificate must be valid for the URL's host name, which is sent in SNI (Security 5, 7)."""
        told: list[str | None] = []
        server = self.server(files, files.good)
        server.sni_callback = lambda _socket, name, _context: told.append(name)

        async def local(_host: str, _port: int) -> tuple[str, ...]:
            return ("127.0.0.1",)

        async with receiving(tls=server) as receiver:
            reply = await send(
                receiver, scheme="https", host="localhost", tls=self.client(files), resolve=local
            )
            assert reply.status == 204
            for host in (NAME, "other.example"):
                with pytest.raises(NotReached, match="certificate"):
                    await send(
                        receiver, scheme="https", host=host, tls=self.client(files), resolve=local
                    )
        assert told == ["localhost", NAME, "other.example"]
        assert [call.headers["host"] for call in receiver.calls] == [f"localhost:{receiver.port}"]

    async def test_an_address(self, files: Files) -> None:
        """A certificate may be issued for an IP address (Security 5)."""
        async with receiving(tls=self.server(files, files.good)) as receiver:
            told = self.client(files)
            assert (await send(receiver, scheme="https", host="127.0.0.1", tls=told)).status == 204

    @pytest.mark.parametrize("kind", ["self_signed", "expired", "other_host"])
    async def test_bad_certificates(self, files: Files, kind: str) -> None:
        """Nothing is sent to a receiver with an invalid certificate (Security 5, fault I1)."""
        async with receiving(tls=self.server(files, getattr(files, kind))) as receiver:
            with pytest.raises(NotReached, match="certificate"):
                await send(receiver, scheme="https", host="127.0.0.1", tls=self.client(files))
        assert not receiver.calls

    async def test_unknown_authority(self, files: Files) -> None:
        """By default only the system's authorities are trusted (Security 5)."""
        async with receiving(tls=self.server(files, files.good)) as receiver:
            with pytest.raises(NotReached, match="certificate"):
                await send(receiver, scheme="https", host="127.0.0.1", tls=trusted())
        assert not receiver.calls

    @pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
    async def test_old_versions(self, files: Files) -> None:
        """TLS versions before 1.2 are refused (Security 5)."""
        server = self.server(files, files.good)
        server.minimum_version = ssl.TLSVersion.TLSv1
        server.maximum_version = ssl.TLSVersion.TLSv1_1
        server.set_ciphers("ALL:@SECLEVEL=0")
        async with receiving(tls=server) as receiver:
            with pytest.raises(NotReached, match="TLS"):
                await send(receiver, scheme="https", host="127.0.0.1", tls=self.client(files))
        assert not receiver.calls
        assert trusted().minimum_version is ssl.TLSVersion.TLSv1_2

    async def test_no_tls_at_all(self, files: Files) -> None:
        """If the receiver does not speak TLS, nothing is sent, and the connection is closed (fault I1)."""
        async with receiving(OK) as receiver:
            told = self.client(files)
            with pytest.raises(NotReached, match="in time"):
                await send(receiver, scheme="https", host="127.0.0.1", tls=told, within=0.3)
            await eventually(lambda: not receiver.open)
        assert not receiver.calls


async def test_no_address_is_no_call() -> None:
    """A checked URL without addresses leads to an error, not to a call (fault I3)."""
    async with receiving() as receiver:
        checked = await check_url(f"http://127.0.0.1:{receiver.port}/", policy(receiver))
        with pytest.raises(ValueError, match="unpack"):
            await post(Checked(checked.parts, ()), b"", {}, tls=NOBODY, within=1)
        with pytest.raises(InvalidInput):
            await check_url(f"http://127.0.0.1:{receiver.port}/", UrlPolicy())
    assert receiver.touched == 0
