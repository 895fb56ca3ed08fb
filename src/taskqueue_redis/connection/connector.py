"""Opening connections with redis-py, which connects, verifies certificates, logs in and selects the database.

`client.py` imports this module when a client is created, because the import of redis-py takes half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from redis._parsers import _AsyncHiredisParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.credentials import CredentialProvider, StreamingCredentialProvider
from redis.exceptions import ResponseError

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import BackgroundTasks, SingleFlight
from taskqueue_redis.connection.connection import RedisConnection
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Lost,
    Unreachable,
    classify_connecting,
    says_denied,
)


class _ErrorReply(ErrorReply, ResponseError):
    """An error reply that redis-py recognises as such."""


_HANGING = 10
"""maximum number of threads of one client that may hang while they read credentials"""


class _Parser(_AsyncHiredisParser):
    parse_error = _ErrorReply


class _Guarded(AbstractConnection):
    """A connection of redis-py that refuses addresses which the settings do not allow. Closing it does not wait."""

    def __init__(self, *, settings: RedisSettings, **options: Any) -> None:
        self._settings = settings
        super().__init__(**options)

    async def _connect(self) -> None:
        host, port = getattr(self, "host", ""), getattr(self, "port", 0)
        self._settings.refuse_exposed(HostAddress(host, port, getattr(self, "path", "")))
        await super()._connect()  # type: ignore[no-untyped-call,safe-super]

    async def disconnect(self, *args: Any, **options: Any) -> None:
        if self._writer is not None:
            self._writer.transport.abort()  # the end of a TLS connection would wait for the server
        await super().disconnect(*args, **options)


class _TcpConnection(_Guarded, Connection): ...


class _UnixConnection(_Guarded, UnixDomainSocketConnection): ...


class _TlsConnection(_Guarded, SSLConnection):
    def _connection_arguments(self) -> dict[str, Any]:
        # redis-py would trust the CAs of this machine in addition to the CA file. Files are read for each connection.
        options = self.ssl_context
        try:
            context = ssl.create_default_context(cafile=options.ca_certs)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.check_hostname = options.check_hostname
            context.verify_mode = options.cert_reqs
            for flag in options.include_verify_flags or ():
                context.verify_flags |= flag
            for flag in options.exclude_verify_flags or ():
                context.verify_flags &= ~flag
            if options.certfile:
                # Without a password, OpenSSL would ask for one on the terminal.
                password = options.password or ""
                context.load_cert_chain(options.certfile, options.keyfile, password)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigurationError(
                "TASKQUEUE_REDIS_TLS_CA_FILE, _TLS_CERT_FILE or _TLS_KEY_FILE: cannot be used "
                f"({type(error).__name__}); allowed: PEM files that this process may read, and "
                "ssl_password in TASKQUEUE_REDIS_URL for an encrypted key"
            ) from None
        if options.ciphers:
            try:
                context.set_ciphers(options.ciphers)
            except ssl.SSLError:
                raise ConfigurationError(
                    "TASKQUEUE_REDIS_URL: ssl_ciphers names no known cipher; allowed: a list of ciphers for OpenSSL"
                ) from None
        return {"host": self.host, "port": self.port, "ssl": context}


class _Login(CredentialProvider):
    """The user and password, read for each connection from the settings or the credential provider."""

    def __init__(self, settings: RedisSettings) -> None:
        self.provider = settings.credential_provider and settings.credential_provider()
        if self.provider and not isinstance(self.provider, CredentialProvider):
            raise ConfigurationError(
                f"TASKQUEUE_REDIS_CREDENTIAL_PROVIDER: it returned a {type(self.provider).__name__}; "
                "allowed: a redis.credentials.CredentialProvider"
            )
        self._settings = settings
        self._threads = threading.Semaphore(_HANGING)
        self.reading = SingleFlight(self._read, "read the password of Redis")

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        known = self.provider is None and self._settings.password_file is None
        found: Any = self._known() if known else await self.reading.join()
        if not (isinstance(found, tuple) and found and found[-1]):
            raise ConfigurationError(
                "TASKQUEUE_REDIS_CREDENTIAL_PROVIDER: it returned no password; allowed: (user, password) or (password,)"
            )
        return found

    def _known(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._settings.user_name, self._settings.password_now())))

    async def _read(self) -> Any:
        # Without a time limit, a call that hangs once would never be repeated.
        async with asyncio.timeout(self._settings.connect_timeout):
            if self.provider is None:
                return await _in_thread(self._known, self._threads)
            kind = type(self.provider)
            if kind.get_credentials_async is CredentialProvider.get_credentials_async:
                return await _in_thread(self.provider.get_credentials, self._threads)
            return await self.provider.get_credentials_async()


async def _in_thread(call: Callable[[], Any], threads: threading.Semaphore) -> Any:
    """Run a function that may block, in a thread that does not delay the end of the process.

    Raises `TimeoutError` if too many threads hang.
    """
    if not threads.acquire(blocking=False):
        raise TimeoutError
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # from now on, it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised in the event loop
            done.set_exception(error)
        finally:
            threads.release()

    threading.Thread(target=run, name="taskqueue-credentials", daemon=True).start()
    return await asyncio.wrap_future(done)


class Connector:
    """Opens the connections of one client."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._login = _Login(settings)
        self._named = True
        self._open: WeakSet[RedisConnection] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewals = BackgroundTasks()
        if isinstance(self._login.provider, StreamingCredentialProvider):
            self._login.provider.on_next(self._renewed)

    def remap(self, address: tuple[str, int]) -> tuple[str, int]:
        """Return the address to connect to, given the address that a Sentinel or cluster node has reported."""
        remap = self.settings.address_remap
        try:
            host, port = remap(address) if remap else address
            return str(host), int(port)
        except Exception as error:  # noqa: BLE001 - the function is the user's
            raise ConfigurationError(
                f"TASKQUEUE_REDIS_ADDRESS_REMAP: it failed for {HostAddress(*address)} ({type(error).__name__}); "
                "allowed: a function that gets a pair (host, port) and returns one"
            ) from None

    def options(self, *, sentinel: bool = False) -> dict[str, Any]:
        """Return the arguments for connections of redis-py, except the address."""
        settings, address = self.settings, self.settings.address
        options: dict[str, Any] = {
            "connection_class": _TlsConnection if address.tls else _TcpConnection,
            "settings": settings,
            "parser_class": _Parser,
            "socket_connect_timeout": settings.connect_timeout,
            "socket_timeout": settings.connect_timeout,
            "driver_info": None,  # Redis before 7.2 has no CLIENT SETINFO, and its access lists cannot name it
            "protocol": 2,
            "client_name": "taskqueue",
            **address.options,
        }
        options.pop("health_check_interval", None)  # only `RedisConnection` uses it
        if not self._named:
            options["client_name"] = None
        if address.tls:
            options |= {
                "ssl_ca_certs": settings.tls_ca_file,
                "ssl_certfile": settings.tls_cert_file,
                "ssl_keyfile": settings.tls_key_file,
                "ssl_cert_reqs": "none"
                if settings.dangerously_skip_tls_verification
                else "required",
            }
        if sentinel:
            secret = settings.sentinel_password and settings.sentinel_password.get_secret_value()
            return options | {
                "protocol": 2,
                "username": settings.sentinel_user or None,
                "password": secret,
            }
        login = self._login if settings.has_password else None
        return options | {"db": address.database, "credential_provider": login}

    async def open(self, place: HostAddress, *, sentinel: bool = False) -> RedisConnection:
        """Connect to a server, or to a Sentinel, and log in. Raises `Unreachable`."""
        try:
            connection = await self._connect(place, self.options(sentinel=sentinel))
        except Exception as error:  # noqa: BLE001 - redis-py and providers of credentials raise errors of any class
            policy, failure = classify_connecting(error)
            if not self._named or not says_denied(failure):
                raise Unreachable(policy, failure) from None
            self._named = False  # the ACL may forbid CLIENT SETNAME, which nothing depends on
            return await self.open(place, sentinel=sentinel)
        if not sentinel:  # renewed credentials are not those of Sentinels
            self._open.add(connection)
            self._loop = connection.loop
        return connection

    async def _connect(self, place: HostAddress, options: dict[str, Any]) -> RedisConnection:
        kind = options.pop("connection_class")
        address = {"path": place.path} if place.path else {"host": place.host, "port": place.port}
        opened = (_UnixConnection if place.path else kind)(**address, **options)
        try:
            async with asyncio.timeout(self.settings.connect_timeout):
                await opened.connect()
            return RedisConnection(opened, NOT_ENOUGH_DATA, self.settings)
        except BaseException:
            await opened.disconnect()
            raise

    async def aclose(self) -> None:
        """Stop reading credentials and renewing logins."""
        await self._login.reading.aclose()
        await self._renewals.aclose()

    def _renewed(self, token: Any) -> None:
        # Providers call this in a thread.
        login = (token.try_get("oid"), token.get_value())
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._renew_all, login)

    def _renew_all(self, login: tuple[str, str]) -> None:
        for connection in self._open:
            self._renewals.start(_renew(connection, login))


async def _renew(connection: RedisConnection, login: tuple[str, str]) -> None:
    with contextlib.suppress(ErrorReply, Lost):
        if not connection.listening:
            await connection.call("AUTH", *login)
            return
    connection.give_up("the credentials were renewed")
