"""Authentication of clients, at each request and repeatedly while a connection is open."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.hooks import Hooks, Identity
from taskqueue_server.auth.credentials import (
    by_cookie,
    mark_authenticated,
    peer_of,
    secret_of,
    session_of,
    set_session,
    token_of,
)
from taskqueue_server.auth.sessions import Session, Sessions
from taskqueue_server.auth.tokens import Tokens, signature

RELOAD_SECONDS = 2.0
"""seconds between checks for changes to the tokens file"""
CHECK_SECONDS = 3.0
"""seconds between checks of the tokens of all open connections"""
OBSERVING = ("observe", "admin")
"""the rights of which one permits to see queues and tasks, without payloads and results"""
OPEN = Identity(name="anybody")
"""identity of every client of a server without authentication"""
_BATCH = 50
"""number of credentials checked before other tasks of the event loop get a turn"""
_log = logging.getLogger("taskqueue.server.access")

Allowed = Callable[[Identity], bool]


def may_observe(identity: Identity, key: str | None = None) -> bool:
    """Return whether a client may see the queue ``key``, or without a key all queues."""
    return any(identity.is_allowed(verb, key) for verb in OBSERVING)


@dataclass(eq=False, slots=True)
class AccessWatch:
    """The token of one open connection. The rights of the token are checked repeatedly."""

    token: str | None = field(repr=False)
    peer: str
    allowed: Allowed
    session: Session | None = None
    revoked: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, identity: Identity | None) -> None:
        """Set ``revoked`` unless the identity still has the rights that the connection needs."""
        try:
            is_allowed = identity is not None and self.allowed(identity)
        except Exception:  # noqa: BLE001 - an identity from a plugin may raise anything; the other checks must continue
            is_allowed = False
        if not is_allowed:
            self.revoked.set()


class AccessControl:
    """Authenticates clients, first with plugins, then with the tokens file. Each server process has one instance."""

    def __init__(self, settings: Settings, hooks: Hooks, backend: Backend) -> None:
        """Read the tokens file, if one is configured. Raises `ConfigurationError` if it is invalid."""
        self.sessions = Sessions(backend)
        self._hooks = hooks
        self._path = settings.tokens_file
        self._signature = signature(self._path) if self._path else None
        self._tokens = Tokens.load(self._path) if self._path else None
        self._watches: set[AccessWatch] = set()
        self._reload_lock = asyncio.Lock()
        self._reported_error: int | None = None
        """hash of the last error logged for the tokens file, so that the same error is not logged again"""
        self._reload_requested = asyncio.Event()

    @property
    def authenticates(self) -> bool:
        """Whether clients must authenticate. A server without authentication listens on loopback only."""
        return self._tokens is not None or self._hooks.wants("authenticate")

    def identify(self, token: str | None, peer: str) -> Identity | None:
        """Return the identity of a token, or ``None`` if it is not valid. Without authentication, return `OPEN`.

        Plugins take precedence over the tokens file.
        """
        if not self.authenticates:
            return OPEN
        result = self._hooks.first("authenticate", token=token, peer=peer)
        if result is not None and not isinstance(result, Identity):
            _log.error("authentication plugin did not return an Identity; request rejected")
            return None
        if result is None and self._tokens is not None:
            result = self._tokens.identify(token, time.time())
        return result

    def authenticate(self, connection: HTTPConnection, token: str | None = None) -> Identity | None:
        """Identify the client of a request, by ``token`` if given. If it is known, lift its connection's limits."""
        shown = token_of(connection) if token is None else token
        identity = self.identify(shown, peer_of(connection))
        if identity is not None and token is None and session_of(connection) is not None:
            identity = None if identity.verbs.isdisjoint(OBSERVING) else identity
        if identity is not None:
            mark_authenticated(connection.scope)
        return identity

    async def open_session(self, connection: HTTPConnection) -> None:
        """Find the session of a request whose only credential is the cookie. Raises `BackendUnavailable`."""
        if self.authenticates and by_cookie(connection):
            set_session(connection, await self.sessions.find(secret_of(connection)))

    @contextlib.contextmanager
    def watch_access(
        self, token: str | None, peer: str, allowed: Allowed, session: Session | None = None
    ) -> Generator[asyncio.Event, None, None]:
        """Check the token and the session repeatedly during the block. The yielded event is set once access is revoked.

        The expiry of the token and a changed response of a plugin are detected after at most about `CHECK_SECONDS`, and
        a changed tokens file after at most about `RELOAD_SECONDS`.
        """
        watch = AccessWatch(token, peer, allowed, session)
        self._watches.add(watch)
        try:
            yield watch.revoked
        finally:
            self._watches.discard(watch)

    def ask_to_reload(self) -> None:
        """Make `watch` read the tokens file at once, even if it has not changed."""
        self._reload_requested.set()

    async def reload(self) -> bool:
        """Read the tokens file and revoke access that it no longer grants. Return false if the file is invalid.

        In that case the previous tokens stay in force, and an error that repeats is logged only once.
        """
        path = self._path
        if path is None:
            return True
        async with self._reload_lock:
            self._signature = await asyncio.to_thread(signature, path)
            try:
                tokens = await asyncio.to_thread(Tokens.load, path)
            except ConfigurationError as error:
                if self._reported_error != (error_hash := hash(str(error))):
                    self._reported_error = error_hash
                    _log.error("tokens file not reloaded, previous tokens stay in force: %s", error)
                return False
            self._reported_error = None
            old, self._tokens = self._tokens, tokens
        if old is None or old.entries != tokens.entries:
            _log.info("tokens file reloaded")
            await self.check()
        return True

    async def watch(self) -> None:
        """Check the tokens file and all open connections periodically until cancelled."""
        loop = asyncio.get_running_loop()
        reload_at = loop.time() + RELOAD_SECONDS
        check_at = loop.time() + CHECK_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(reload_at, check_at)):
                    await self._reload_requested.wait()
            try:
                if self._reload_requested.is_set():
                    self._reload_requested.clear()
                    await self.reload()
                if loop.time() >= reload_at:
                    reload_at = loop.time() + RELOAD_SECONDS
                    await self._reload_tokens()
                if loop.time() >= check_at:
                    check_at = loop.time() + CHECK_SECONDS
                    await self.check()
            except Exception:  # noqa: BLE001 - no error may end the periodic checks
                _log.exception("could not check the tokens file or the open connections")

    async def check(self) -> None:
        """Authenticate all open connections again; connections with the same token and address share one check."""
        if not self.authenticates:
            return
        known: dict[tuple[str | None, str], Identity | None] = {}
        session = next((watch.session for watch in self._watches if watch.session), None)
        if session is not None:
            with contextlib.suppress(TaskQueueError):  # an outage of the store ends no session
                await self.sessions.refresh(session.name)
        for watch in tuple(self._watches):
            credentials = (watch.token, watch.peer)
            if credentials not in known:
                known[credentials] = self.identify(*credentials)
                if len(known) % _BATCH == 0:
                    await asyncio.sleep(0)
            is_open = watch.session is None or self.sessions.is_open(watch.session.name)
            watch.check(known[credentials] if is_open else None)

    async def _reload_tokens(self) -> None:
        if self._path is not None:
            result = await asyncio.to_thread(signature, self._path)
            # After an error, read the file even if it has not changed: it may have become readable.
            if result != self._signature or self._reported_error is not None:
                await self.reload()


def check_host(settings: Settings, hooks: Hooks) -> None:
    """Raise `ConfigurationError` if a server without authentication would listen on a non-loopback address."""
    if not _authenticates(settings, hooks) and not _is_loopback(settings.host):
        raise ConfigurationError(
            "TASKQUEUE_HOST: a server without authentication may listen on loopback only "
            "(127.0.0.1, ::1 or localhost). Create a token with 'taskqueue token new "
            "NAME --file tokens.toml', and set TASKQUEUE_TOKENS_FILE to the file"
        )


def notice(settings: Settings, hooks: Hooks) -> tuple[int, str] | None:
    """Return the level and the text of what the server logs about its security at startup, if anything."""
    if not _authenticates(settings, hooks):
        return logging.INFO, (
            "no authentication: every user of this machine can use this server; other machines "
            "cannot reach it ('taskqueue token new' creates a token)"
        )
    proxied = any(origin.startswith("https://") for origin in settings.origins)
    if _is_loopback(settings.host) or settings.tls_certificate is not None or proxied:
        return None
    return logging.WARNING, (
        "no TLS: tokens and tasks are sent in plain text. Set TASKQUEUE_TLS_CERTIFICATE and "
        "TASKQUEUE_TLS_KEY, or, if a proxy ends TLS, its https URL in TASKQUEUE_ORIGINS"
    )


def _authenticates(settings: Settings, hooks: Hooks) -> bool:
    return settings.tokens_file is not None or hooks.wants("authenticate")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
