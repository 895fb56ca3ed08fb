"""Logging in to Redis: providers of credentials, password files that follow later, and rights that are missing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis.credentials import CredentialProvider, StreamingCredentialProvider

from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, PublishUnconfirmed
from taskqueue_core.tasks import Delivery
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.failures import Misconfigured, NotReached
from taskqueue_redis.connection.pubsub import PubSubListener
from taskqueue_redis.setup.permissions import access_list
from taskqueue_worker import LocalWorker
from tests.redis.backends import KEY, opened, publish, take, until
from tests.redis.conftest import MakeServer
from tests.redis.links import KEY as KEY_OF_LINK
from tests.redis.links import SHORT, linked
from tests.redis.resp import RedisError
from tests.redis.servers import RedisServer
from tests.worker.local import publish as send
from tests.worker.local import serving

SECRET = "canary-5up3r"
LONG: dict[str, Any] = {"operation_timeout": 30.0}


class Provider(CredentialProvider):
    """A provider that returns what it was given."""

    def __init__(self, returns: Any) -> None:
        self.returns = returns
        self.asked = 0

    def get_credentials(self) -> Any:
        """Return the credentials, or call a function that does."""
        self.asked += 1
        return self.returns() if callable(self.returns) else self.returns


def protected(make_server: MakeServer) -> RedisServer:
    """Start a server with a password for the default user, and a user with the rights of the package."""
    server = make_server(
        acl=f"user default on >{SECRET} ~* &* +@all\n"
        + access_list("tq", "tq", f">{SECRET}").splitlines()[1]
    ).start()
    server.login = ("default", SECRET)
    return server


def bare(server: RedisServer) -> str:
    """Return the URL of a server without a login."""
    return f"redis://127.0.0.1:{server.port}"


async def who(link: RedisClient) -> bytes:
    """Return the user as which a link is logged in."""
    name: bytes = await link.command(KEY_OF_LINK, "ACL", "WHOAMI")
    return name


async def test_credentials_of_a_provider(make_server: MakeServer) -> None:
    """U28: a provider of credentials is asked for each connection, whichever of redis-py's methods it has."""
    server = protected(make_server)

    class Asynchronous(Provider):
        async def get_credentials_async(self) -> Any:
            return self.get_credentials()

    for provider in (Provider(("default", SECRET)), Asynchronous((SECRET,))):
        async with linked(bare(server), credential_provider=lambda got=provider: got) as link:
            assert await who(link) == b"default"
            server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert await who(link) == b"default"
        assert provider.asked == 2


@pytest.mark.parametrize("nothing", [None, (), ("",), ("user", ""), ("user", None), "text"])
async def test_a_provider_without_credentials(redis_server: RedisServer, nothing: Any) -> None:
    """U28: a provider that returns no credentials is an error; the client does not log in as the default user."""
    async with linked(
        redis_server.url, credential_provider=lambda: Provider(nothing), **SHORT
    ) as link:
        with pytest.raises(Misconfigured, match="CREDENTIAL_PROVIDER"):
            await link.command(KEY_OF_LINK, "PING")


async def test_a_provider_that_fails(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """U28: an error of a provider is an outage, and its text, which may have a secret, is not shown."""

    def fail() -> None:
        raise ValueError(SECRET)

    limits = SHORT | {"operation_timeout": 0.3}
    async with linked(
        redis_server.url, credential_provider=lambda: Provider(fail), **limits
    ) as link:
        with pytest.raises(NotReached, match="ValueError"):
            await link.command(KEY_OF_LINK, "PING")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "thread"])
async def test_a_provider_that_hangs_once(redis_server: RedisServer, blocking: bool) -> None:  # noqa: FBT001
    """U28: a call of a provider that hangs is given up after the connect timeout, and the next one is a new call."""
    release = threading.Event()
    asked = 0

    class Threaded(CredentialProvider):
        def get_credentials(self) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                release.wait()
            return ("default", "x")

    class Asynchronous(Threaded):
        async def get_credentials_async(self) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                await asyncio.Event().wait()
            return ("default", "x")

    kind = Threaded if blocking else Asynchronous
    limits = SHORT | {"operation_timeout": 30.0}
    try:
        async with linked(redis_server.url, credential_provider=kind, **limits) as link:
            assert await link.command(KEY_OF_LINK, "PING") == b"PONG"
        assert asked == 2
    finally:
        release.set()


async def test_a_provider_that_blocks(redis_server: RedisServer) -> None:
    """U28: a provider that blocks delays neither the event loop nor the end, and its threads are bounded."""
    release = threading.Event()
    provider = Provider(release.wait)
    try:
        async with linked(redis_server.url, credential_provider=lambda: provider, **SHORT) as link:
            waiting = asyncio.create_task(link.command(KEY_OF_LINK, "PING"))
            begun = time.monotonic()
            await until(lambda: provider.asked == 1, "the provider is asked")
            assert time.monotonic() - begun < 10  # the loop was free to see it
            with pytest.raises(NotReached):
                await waiting
        threads = [
            thread for thread in threading.enumerate() if thread.name == "taskqueue-credentials"
        ]
        assert 1 <= provider.asked == len(threads) <= 10
        assert all(thread.daemon for thread in threads)
    finally:
        release.set()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_renewed_credentials(make_server: MakeServer, protocol: int) -> None:
    """U28: a streaming provider renews the login of open connections; the listener connects again if it must."""

    class Streaming(Provider, StreamingCredentialProvider):
        renew: Callable[[Any], None]

        def on_next(self, callback: Callable[[Any], Any]) -> None:
            self.renew = callback

        def on_error(self, callback: Callable[[Exception], Any]) -> None: ...

        def is_streaming(self) -> bool:
            return True

    class Token:
        def try_get(self, _: str) -> str:
            return "second"

        def get_value(self) -> str:
            return SECRET

    server = protected(make_server)
    for user in ("first", "second"):
        server.call("ACL", "SETUSER", user, "on", f">{SECRET}", "~*", "&*", "+@all")
    provider = Streaming(("first", SECRET))
    url = f"{bare(server)}?protocol={protocol}"
    async with linked(url, credential_provider=lambda: provider) as link:
        signal = PubSubListener(link, lambda _, __: None, lambda: None)
        await signal.listen("b")
        assert await who(link) == b"first"
        number = await link.command(KEY_OF_LINK, "CLIENT", "ID")
        provider.returns = ("second", SECRET)
        await asyncio.to_thread(provider.renew, Token())
        await until(
            lambda: server.call("CLIENT", "LIST").count(b"user=second") == 2,
            "both use the second user",
        )
        assert await link.command(KEY_OF_LINK, "CLIENT", "ID") == number
        assert b"user=first" not in server.call("CLIENT", "LIST")
        await signal.aclose()


async def taken(consumer: Subscription) -> Delivery:
    """Take one delivery, as a worker does: it tries again while the store is unavailable."""
    while True:
        with contextlib.suppress(BackendUnavailable):
            return (await take(consumer, 1))[0]


def change_password(server: RedisServer, password: str) -> None:
    """Change the password of the default user, and close the connections that used the old one."""
    with server.connect() as admin:
        admin.call("ACL", "SETUSER", "default", "resetpass", f">{password}")
        server.login = ("default", password)
        admin.call("CLIENT", "KILL", "TYPE", "pubsub")
        admin.call("CLIENT", "KILL", "TYPE", "normal")


async def test_a_password_file_that_follows_later(
    make_server: MakeServer, redis_prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """U28: a new password is an outage until its file follows, also if the file is empty or absent for a moment."""
    server = protected(make_server)
    file = tmp_path / "password"
    file.write_text(SECRET)
    values: dict[str, Any] = {"password_file": file, **LONG}
    async with opened(bare(server), redis_prefix, **values) as backend:
        consumer = backend.subscribe([KEY], "c")
        await publish(backend, "a")
        (first,) = await take(consumer, 1)
        trouble = backend._context.client.trouble
        spoil: tuple[Callable[[], object], ...] = (int, lambda: file.write_text(""), file.unlink)
        for number, change in enumerate(spoil):
            change()
            change_password(server, f"{SECRET}{number}")
            publishing = asyncio.create_task(publish(backend, f"b{number}"))
            taking = asyncio.create_task(taken(consumer))
            await until(lambda: "PASSWORD" in (trouble.text or ""), "the outage is seen")
            file.write_text(f"{SECRET}{number}\n")
            await publishing
            delivery = await taking
            assert delivery.task.id == f"b{number}"
            await consumer.ack(delivery)
        await consumer.ack(first)
    assert SECRET not in caplog.text


async def test_an_outage_by_a_password_ends_no_call_as_a_wrong_configuration(
    make_server: MakeServer, redis_prefix: str, tmp_path: Path
) -> None:
    """U28: at the start a wrong password is an error at once; afterwards calls say that the store is unavailable."""
    server = protected(make_server)
    file = tmp_path / "password"
    file.write_text("wrong")
    values: dict[str, Any] = {"password_file": file, "operation_timeout": 0.5}
    async with opened(
        bare(server), redis_prefix, **values | {"operation_timeout": 30.0}
    ) as backend:
        with pytest.raises(ConfigurationError, match="does not accept"):
            await publish(backend, "a")
    file.write_text(SECRET)
    async with opened(bare(server), redis_prefix, **values) as backend:
        await publish(backend, "a")
        change_password(server, "another")
        with pytest.raises((BackendUnavailable, PublishUnconfirmed)):
            await publish(backend, "b")
        with pytest.raises(BackendUnavailable):
            await backend.control.configure(KEY, QueueSettings(durability=Durability.PROCESS))


async def test_rights_that_are_missing_for_a_while(make_server: MakeServer) -> None:
    """U28: rights that are taken away after the start are an outage, and everything continues once they are back.

    This holds for commands, keys and channels; a consumer that waited is woken by a task that was published meanwhile.
    """
    server = protected(make_server)
    url = f"redis://tq:{SECRET}@127.0.0.1:{server.port}"
    async with opened(url, "tq", lease=15.0, **LONG) as backend:
        consumer = backend.subscribe([KEY], "c")
        await publish(backend, "0")
        await consumer.ack((await take(consumer, 1))[0])
        for number, (away, back) in enumerate(
            (("resetchannels", "&{tq:*"), ("resetkeys", "~{tq:*"), ("-evalsha", "+evalsha"))
        ):
            taking = asyncio.create_task(taken(consumer))
            await until(lambda: consumer.asleep, "the consumer waits")
            server.call("ACL", "SETUSER", "tq", away)
            server.call("CLIENT", "KILL", "TYPE", "pubsub")
            publishing = asyncio.create_task(publish(backend, f"t{number}"))
            await until(
                lambda: backend._context.client.trouble.text is not None, "the outage is seen"
            )
            server.call("ACL", "SETUSER", "tq", back)
            await publishing
            delivery = await taking
            assert delivery.task.id == f"t{number}"
            await consumer.ack(delivery)


async def test_configuring_without_rights(make_server: MakeServer) -> None:
    """U28: `configure` checks the servers again; what is wrong then is an outage."""
    server = protected(make_server)
    url = f"redis://tq:{SECRET}@127.0.0.1:{server.port}"
    async with opened(url, "tq", operation_timeout=0.5) as backend:
        await publish(backend, "a")
        settings = QueueSettings(durability=Durability.PROCESS)
        for away, back in (
            (("ACL", "SETUSER", "tq", "-xadd"), ("ACL", "SETUSER", "tq", "+xadd")),
            (
                ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
                ("CONFIG", "SET", "maxmemory-policy", "noeviction"),
            ),
        ):
            server.call(*away)
            with pytest.raises(BackendUnavailable):
                await backend.control.configure(KEY, settings)
            server.call(*back)
        await backend.control.configure(KEY, settings)


async def test_a_name_that_may_not_be_set(make_server: MakeServer) -> None:
    """U28: a connection works without its name if the access list forbids the name, as before."""
    server = protected(make_server)
    server.call("ACL", "SETUSER", "tq", "-client|setname")
    async with linked(f"redis://tq:{SECRET}@127.0.0.1:{server.port}") as link:
        with contextlib.suppress(Misconfigured):
            await link.command("{tq:0}", "CLIENT", "ID")
        assert await link.command("{tq:0}", "PING") == b"PONG"
        assert b"name=taskqueue" not in server.call("CLIENT", "LIST")


@pytest.mark.parametrize(
    ("away", "back"),
    [
        ((f">{SECRET}2", f"<{SECRET}"), (f">{SECRET}", f"<{SECRET}2")),
        (("resetchannels",), ("&{tq:*",)),
        (("resetkeys",), ("~{tq:*",)),
        (("-evalsha",), ("+evalsha",)),
        (("-xreadgroup",), ("+xreadgroup",)),
        (("off",), ("on",)),
    ],
    ids=["password", "channels", "keys", "script", "command in a script", "user"],
)
async def test_no_worker_ends(
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
    away: tuple[str, ...],
    back: tuple[str, ...],
) -> None:
    """U28: an outage by a password or right that is longer than every timeout ends no worker."""
    server = protected(make_server)
    url = f"redis://tq:{SECRET}@127.0.0.1:{server.port}"
    limits: dict[str, Any] = {
        "connect_timeout": 0.3,
        "answer_timeout": 0.5,
        "operation_timeout": 0.5,
    }
    async with opened(url, "tq", **limits) as backend, opened(server.url, "tq") as other:
        worker, seen = LocalWorker(backend=backend, concurrency=5), list[int]()

        @worker.task(KEY)
        async def note(n: int) -> None:
            seen.append(n)

        trouble = backend._context.client.trouble
        note_failure = Mock(wraps=trouble.note)
        monkeypatch.setattr(trouble, "note", note_failure)
        async with serving(worker) as ended:
            await send(other, 1)
            await until(lambda: seen == [1], "the worker works")
            server.call("ACL", "SETUSER", "tq", *away)
            with contextlib.suppress(RedisError):
                server.call("CLIENT", "KILL", "USER", "tq")
            await send(other, 2)
            await until(lambda: note_failure.call_count > 5, "several calls have failed")
            server.call("ACL", "SETUSER", "tq", *back)
            await until(lambda: 2 in seen, "the worker works again")
            await until(lambda: trouble.text is None, "the outage is over")
            assert not ended.done()
