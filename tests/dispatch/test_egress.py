"""Tests of which callback URLs are allowed, at submit and at the call, with many spellings of forbidden addresses."""

from __future__ import annotations

import asyncio
import socket
import threading
from ipaddress import ip_address, ip_network

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task
from taskqueue_dispatch.callbacks.tasks import callback_task
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.outbound_http.addresses import may_be_reached
from taskqueue_dispatch.outbound_http.dns import CachedLookup, NameUnknown, NotReached, look_up
from taskqueue_dispatch.outbound_http.url_policy import UrlPolicy, check_url
from taskqueue_dispatch.outbound_http.urls import read_url
from taskqueue_memory import MemoryBackend
from tests.dispatch.patience import PATIENCE, eventually
from tests.dispatch.receivers import connections, receiving_at, sending, settings
from tests.dispatch.spellings import HOSTS, WHOLE

NAMES = {
    "localhost": ("127.0.0.1", "::1"),
    "localhost.localdomain": ("127.0.0.1",),
    "ip6-localhost": ("::1",),
    "inside.example": ("10.0.0.7",),
    "loopback.example": ("127.0.0.1",),
    "mixed.example": ("93.184.215.14", "127.0.0.1"),
    "mixed-six.example": ("2606:2800:21f:cb07::1", "::1"),
    "mapped.example": ("::ffff:169.254.169.254",),
    "translated.example": ("64:ff9b::a9fe:a9fe",),
    "scoped.example": ("fe80::1%lo",),
    "odd.example": ("no address",),
    "metadata.example": ("169.254.169.254",),
}
PORTS = [22, 25, 80, 6379, 8080, 8420, 11211, 442, 444, 8444, 65535]


async def public(host: str, port: int) -> tuple[str, ...]:
    """Resolve the names of these tests.

    Other hosts, for example numbers in other bases, go to the system's resolver.
    """
    if host == "public.example":
        return ("93.184.215.14", "2606:2800:21f:cb07::1")
    return NAMES[host] if host in NAMES else await look_up(host, port)


def test_there_are_enough() -> None:
    """The tests cover well over 60 spellings (fault I3)."""
    assert len({*HOSTS, *WHOLE, *NAMES}) > 150


@pytest.mark.parametrize("policy", [UrlPolicy(), UrlPolicy(http=True)], ids=["https", "http"])
async def test_hosts(policy: UrlPolicy) -> None:
    """No spelling of a non-public address is accepted, and no connection is attempted (OPEN-C7, fault I3)."""
    with connections() as touched:
        for host in [*HOSTS, *NAMES]:
            for scheme in ("https", "http"):
                with pytest.raises(InvalidInput) as caught:
                    await check_url(f"{scheme}://{host}/x", policy, resolve=public)
                assert f"{host}/x" not in str(caught.value)
    assert not touched


@pytest.mark.parametrize("url", WHOLE)
async def test_other_forms(url: str) -> None:
    """A URL that is not exactly https://host[:port][/path][?query] is refused without resolving its host (fault I3)."""

    async def never(_host: str, _port: int) -> tuple[str, ...]:
        raise AssertionError("the host name was resolved")

    with pytest.raises(InvalidInput) as caught:
        await check_url(url, UrlPolicy(), field="callback_url", resolve=never)
    assert caught.value.field == "callback_url"


@pytest.mark.parametrize("port", PORTS)
async def test_other_ports(port: int) -> None:
    """Only the ports 443 and 8443 are allowed, unless the operator allows others (fault I3)."""
    with pytest.raises(InvalidInput, match="443, 8443"):
        await check_url(f"https://public.example:{port}/", UrlPolicy(), resolve=public)
    allowed = UrlPolicy(ports=frozenset({port}))
    checked = await check_url(f"https://public.example:{port}/", allowed, resolve=public)
    assert checked.parts.port == port


async def test_plain_http() -> None:
    """Plain HTTP is refused unless it is allowed, and port 80 is for plain HTTP only (fault I3)."""
    with pytest.raises(InvalidInput, match="https"):
        await check_url("http://public.example/", UrlPolicy(), resolve=public)
    checked = await check_url("http://public.example/", UrlPolicy(http=True), resolve=public)
    assert checked.parts.port == 80
    with pytest.raises(InvalidInput, match="port"):
        await check_url("https://public.example:80/", UrlPolicy(http=True), resolve=public)


@pytest.mark.parametrize(
    ("url", "host", "target", "authority"),
    [
        ("https://public.example", "public.example", "/", "public.example"),
        ("HTTPS://Public.Example:443/A?b=c&d[]=%20", "public.example", "/A?b=c&d[]=%20", "public.example"),
        ("https://public.example:8443?x=/@:y", "public.example", "?x=/@:y", "public.example:8443"),
        ("https://93.184.215.14/hook", "93.184.215.14", "/hook", "93.184.215.14"),
        ("https://[2606:2800:21F:CB07:0:0:0:1]:8443/", "2606:2800:21f:cb07::1", "/", "[2606:2800:21f:cb07::1]:8443"),
        ("https://xn--mnchen-3ya.example/", "xn--mnchen-3ya.example", "/", "xn--mnchen-3ya.example"),
    ],
)  # fmt: skip
async def test_good_ones(url: str, host: str, target: str, authority: str) -> None:
    """A public URL is accepted, with all addresses of its host in the resolver's order (OPEN-C7)."""

    async def resolve(_host: str, _port: int) -> tuple[str, ...]:
        return ("93.184.215.14", "2606:2800:21f:cb07::1")

    checked = await check_url(url, UrlPolicy(), resolve=resolve)
    place = checked.parts
    assert (place.host, place.target, place.authority) == (host, target, authority)
    assert checked.addresses == ((host,) if place.address else await resolve("", 0))


def test_no_path_is_shown() -> None:
    """The repr of a URL omits its path and query, because they may contain secrets (OPEN-C7)."""
    assert "canary" not in repr(read_url("url", "https://public.example/canary?canary"))


@pytest.mark.parametrize(
    ("address", "networks", "good"),
    [
        ("127.0.0.1", ["127.0.0.0/8"], True),
        ("127.0.0.1", ["10.0.0.0/8", "::/0"], False),
        ("10.1.2.3", ["10.1.0.0/16"], True),
        ("10.2.2.3", ["10.1.0.0/16"], False),
        ("::1", ["::1/128"], True),
        ("fd00::5", ["fd00::/8"], True),
        ("0.0.0.0", ["0.0.0.0/0"], False),  # noqa: S104 - no socket is bound
        ("224.0.0.1", ["0.0.0.0/0"], False),
        ("255.255.255.255", ["0.0.0.0/0"], False),
        ("::", ["::/0"], False),
        ("ff02::1", ["::/0"], False),
        ("::ffff:127.0.0.1", ["127.0.0.0/8"], False),
        ("::ffff:127.0.0.1", ["::ffff:0:0/96"], False),
        ("::ffff:127.0.0.1", ["::ffff:0:0/96", "127.0.0.0/8"], True),
        ("64:ff9b::8.8.8.8", ["64:ff9b::/96"], True),
        ("64:ff9b::169.254.169.254", ["64:ff9b::/96"], False),
        ("64:ff9b::10.0.0.1", ["64:ff9b::/96", "10.0.0.0/8"], True),
        ("2002:7f00:1::", ["2002::/16"], False),
        ("2002:808:808::", ["2002::/16"], True),
    ],
)
def test_exceptions(address: str, networks: list[str], good: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """An exception allows its own network only, not addresses embedded in it.

    Multicast and similar addresses stay forbidden (fault I3).
    """
    assert may_be_reached(ip_address(address), map(ip_network, networks)) is good


async def test_submitted_and_called() -> None:
    """A forbidden URL is refused at submit.

    If such a callback is in the queue anyway, it is refused before the call and recorded as failed (fault I3).
    """
    async with receiving_at("127.0.0.1", "::1") as (trap, six):
        ports = (443, 8443, 80, trap.port)
        default = settings(callback_ports=ports, callback_networks=())
        urls = [
            f"http://{host}:{trap.port}/x" for host in [*HOSTS, *NAMES] if host.isprintable()
        ] + [url for url in WHOLE if url.isprintable() and len(url) <= LIMITS.url]
        backend = MemoryBackend()
        async with sending(backend, default, resolve=public) as sender:
            with connections() as touched:
                for url in urls:
                    with pytest.raises(InvalidInput):
                        await sender.check(url)
                jobs = [Task(key="k", headers={"callback-url": url}) for url in urls]
                calls = [callback_task(job, "done", b"1", None) for job in jobs]
                await backend.publisher.publish(*calls)

                async def called() -> bool:
                    ledger = await backend.control.ledger(CALLBACKS)
                    return not ledger.waiting + ledger.in_flight

                await eventually(called)
            assert not touched
            for job in jobs:
                record = await sender.record(job.id)
                assert record is not None
                dead = await backend.dead_letters.get(CALLBACKS, record.webhook_id)
                assert dead is not None
                assert (record.state, dead.reason) == ("failed", "refused")
        assert len(jobs) > 120
        assert trap.touched == six.touched == 0
        await backend.aclose()


class TestNames:
    """How host names are resolved."""

    async def test_none(self) -> None:
        """A name that does not exist and a name that could not be resolved raise different errors (OPEN-C7)."""
        with pytest.raises(NameUnknown):
            await look_up("nothing.invalid", 443)
        with pytest.raises(NotReached):
            await look_up("a" * 64 + ".example", 443)

    async def test_the_system(self) -> None:
        """Each address that the system's resolver returns is listed once (OPEN-C7)."""
        assert "127.0.0.1" in (found := await look_up("localhost", 443))
        assert len(set(found)) == len(found)

    async def test_failures_of_the_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A temporary failure of the resolver does not mean that the name is unknown (OPEN-C7)."""

        def fails(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_AGAIN, "later")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        with pytest.raises(NotReached) as caught:
            await look_up("public.example", 443)
        assert not isinstance(caught.value, NameUnknown)

    async def test_no_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A resolver that hangs is given up after a timeout (OPEN-C7)."""
        monkeypatch.setattr("taskqueue_dispatch.outbound_http.url_policy._SECONDS", 0.01)

        async def hangs(_host: str, _port: int) -> tuple[str, ...]:
            await asyncio.Event().wait()
            return ()

        with pytest.raises(NotReached, match="in time"):
            await check_url("https://public.example/", UrlPolicy(), resolve=hangs)

    async def test_no_address(self) -> None:
        """A name without addresses is refused (fault I3)."""

        async def nothing(_host: str, _port: int) -> tuple[str, ...]:
            return ()

        with pytest.raises(NameUnknown):
            await check_url("https://public.example/", UrlPolicy(), resolve=nothing)

    async def test_at_submit(self) -> None:
        """At submit, an unknown host is refused, but while the resolver fails, jobs are accepted (OPEN-C7)."""
        answers: list[Exception] = [NameUnknown("none"), NotReached("later")]

        async def resolve(_host: str, _port: int) -> tuple[str, ...]:
            raise answers.pop(0)

        backend = MemoryBackend()
        async with sending(backend, settings(), resolve=resolve) as sender:
            with pytest.raises(InvalidInput, match="does not exist"):
                await sender.check("https://one.example/")
            await sender.check("https://two.example/")
        await backend.aclose()


class TestRecently:
    """The cache of resolved names that submit uses."""

    async def test_asked_once(self) -> None:
        """Many jobs for one host resolve its name once, and again after ten seconds (OPEN-C7)."""
        now, asked, go = [0.0], [0], asyncio.Event()

        async def resolve(_host: str, _port: int) -> tuple[str, ...]:
            asked[0] += 1
            await go.wait()
            return ("1.1.1.1",)

        recently = CachedLookup(resolve, lambda: now[0])
        calls = [asyncio.create_task(recently("a.example", 443)) for _ in range(100)]
        await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*calls[1:]) == [("1.1.1.1",)] * 99
        assert asked == [1]
        now[0] = 9.9
        await recently("a.example", 443)
        assert asked == [1]
        now[0] = 10.0
        await recently("a.example", 443)
        await recently("a.example", 8443)
        assert asked == [3]
        await recently.aclose()

    async def test_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the cache is full of names that hang, another name is refused at once (fault I3)."""
        monkeypatch.setattr("taskqueue_dispatch.outbound_http.dns._MANY", 3)
        now, hangs = [0.0], asyncio.Event()

        async def resolve(_host: str, _port: int) -> tuple[str, ...]:
            await hangs.wait()
            return ("1.1.1.1",)

        recently = CachedLookup(resolve, lambda: now[0])
        calls = [asyncio.create_task(recently(f"{n}.example", 443)) for n in range(3)]
        await asyncio.sleep(0)
        now[0] = 20.0
        with pytest.raises(NotReached, match="too many"):
            await recently("3.example", 443)
        hangs.set()
        await asyncio.gather(*calls)
        assert await recently("3.example", 443) == ("1.1.1.1",)
        await recently.aclose()

    async def test_closed(self) -> None:
        """Closing the cache cancels the look-ups in progress (OPEN-C7)."""
        began = asyncio.Event()

        async def resolve(_host: str, _port: int) -> tuple[str, ...]:
            began.set()
            await asyncio.Event().wait()
            return ()

        recently = CachedLookup(resolve)
        call = asyncio.create_task(recently("a.example", 443))
        await began.wait()
        await recently.aclose()
        with pytest.raises(asyncio.CancelledError):
            await call
        await recently.aclose()


async def test_threads_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups that hang occupy at most eight threads, and none of the event loop's default threads (OPEN-C7)."""
    inside, go = [0], threading.Event()

    def hangs(*_: object, **__: object) -> list[object]:
        inside[0] += 1
        go.wait(PATIENCE)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    calls = [asyncio.create_task(look_up(f"{n}.example", 443)) for n in range(50)]
    await eventually(lambda: inside[0] >= 8)
    assert await asyncio.to_thread(lambda: "another thread is free")
    assert inside[0] == 8
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    go.set()
    monkeypatch.undo()
    await look_up("localhost", 443)
    assert inside[0] == 8, "a cancelled look-up does not start"
