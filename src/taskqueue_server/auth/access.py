"""Who may use a server: asked once at the door, and again and again for as long as a connection stays."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Generator

from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, Identity
from taskqueue_server.auth.tokens import Tokens, signature

RELOAD_SECONDS = 2.0
"""between two looks whether the tokens file was changed"""
CHECK_SECONDS = 3.0
"""between two rounds in which everybody who is connected is asked about again"""
OPEN = Identity(name="anybody")
"""everybody, where nothing authenticates"""
_PIECE = 50
"""credentials that are checked before others have their turn"""
_log = logging.getLogger("taskqueue.server.access")

Allowed = Callable[[Identity], bool]


class AccessWatch:
    """The access of one connection, checked again while it lasts. Its repr shows nothing of the token."""

    __slots__ = ("_allowed", "peer", "revoked", "token")

    def __init__(self, token: str | None, peer: str, allowed: Allowed) -> None:
        self.token = token
        self.peer = peer
        self.revoked = asyncio.Event()
        self._allowed = allowed

    def check(self, identity: Identity | None) -> None:
        """Set ``revoked`` unless the identity may still do what the connection does."""
        try:
            stays = identity is not None and self._allowed(identity)
        except Exception:  # noqa: BLE001 - an identity of a plugin may be anything; others must be judged, too
            stays = False
        if not stays:
            self.revoked.set()


class AccessControl:
    """Asks the plugins, then the tokens file. One for each server."""

    def __init__(self, settings: Settings, hooks: Hooks) -> None:
        """Read the tokens file, if the settings name one. Raises `ConfigurationError` for one that is no good."""
        self._hooks = hooks
        self._path = settings.tokens_file
        self._signature = signature(self._path) if self._path else None
        self._tokens = Tokens.load(self._path) if self._path else None
        self._stays: set[AccessWatch] = set()
        self._reading = asyncio.Lock()
        self._refused: int | None = None
        """the hash of what was last said about a file that is no good"""
        self._checked_at = asyncio.Event()

    @property
    def authenticates(self) -> bool:
        """Whether anything says who may come in. Otherwise everybody may, and the server is on loopback only."""
        return self._tokens is not None or self._hooks.wants("authenticate")

    def identify(self, token: str | None, peer: str) -> Identity | None:
        """Say who shows a token, ``None`` if nobody knows it. The first plugin that does counts, then the file."""
        if not self.authenticates:
            return OPEN
        result = self._hooks.first("authenticate", token=token, peer=peer)
        if result is not None and not isinstance(result, Identity):
            _log.error("authentication plugin did not return an Identity; request rejected")
            return None
        if result is None and self._tokens is not None:
            result = self._tokens.identify(token, time.time())
        return result

    @contextlib.contextmanager
    def watch_access(
        self, token: str | None, peer: str, allowed: Allowed
    ) -> Generator[asyncio.Event, None, None]:
        """Keep an eye on who showed a token: the event is set once it stands for nobody who is ``allowed``.

        That is so within `CHECK_SECONDS` of an expiry or a plugin's change of mind, and at once after a changed file
        was read; `RELOAD_SECONDS` may pass until then. Forgotten at the end of the block.
        """
        watch = AccessWatch(token, peer, allowed)
        self._stays.add(watch)
        try:
            yield watch.revoked
        finally:
            self._stays.discard(watch)

    def ask_to_reload(self) -> None:
        """Have `watch` read the tokens file at once, changed or not."""
        self._checked_at.set()

    async def reload(self) -> bool:
        """Read the tokens file now, and end the stay of those who may no longer; return whether that was possible.

        A file that is no good changes nothing: those who could come in still can, and nobody else. The log says why.
        """
        path = self._path
        if path is None:
            return True
        async with self._reading:
            self._signature = await asyncio.to_thread(signature, path)
            try:
                tokens = await asyncio.to_thread(Tokens.load, path)
            except ConfigurationError as error:
                if self._refused != (refused := hash(str(error))):
                    self._refused = refused
                    _log.error("tokens file not reloaded, previous tokens stay in force: %s", error)
                return False
            self._refused = None
            old, self._tokens = self._tokens, tokens
        if old is None or old.entries != tokens.entries:
            _log.info("tokens file reloaded")
            await self.check()
        return True

    async def watch(self) -> None:
        """Look at the file and at everybody who is connected, for ever."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + RELOAD_SECONDS
        check_at = loop.time() + CHECK_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(look_at, check_at)):
                    await self._checked_at.wait()
            try:
                if self._checked_at.is_set():
                    self._checked_at.clear()
                    await self.reload()
                if loop.time() >= look_at:
                    look_at = loop.time() + RELOAD_SECONDS
                    await self._reload_tokens()
                if loop.time() >= check_at:
                    check_at = loop.time() + CHECK_SECONDS
                    await self.check()
            except Exception:  # noqa: BLE001 - whatever it was, the next round must come
                _log.exception("could not check open connections against the tokens")

    async def check(self) -> None:
        """Ask again about everybody who is connected. Each token is asked about once."""
        if not self.authenticates:
            return
        known: dict[tuple[str | None, str], Identity | None] = {}
        for watch in tuple(self._stays):
            shown = (watch.token, watch.peer)
            if shown not in known:
                known[shown] = self.identify(*shown)
                if len(known) % _PIECE == 0:
                    await asyncio.sleep(0)
            watch.check(known[shown])

    async def _reload_tokens(self) -> None:
        if self._path is not None:
            result = await asyncio.to_thread(signature, self._path)
            # What could not be read may be readable now, though it did not change: who was revoked must not stay.
            if result != self._signature or self._refused is not None:
                await self.reload()


def check_host(settings: Settings, hooks: Hooks) -> None:
    """Raise `ConfigurationError` for a server that others can reach, and that would let them all in."""
    if settings.tokens_file is None and not hooks.wants("authenticate"):
        host = settings.host
        if not _is_loopback(host):
            raise ConfigurationError(
                "TASKQUEUE_HOST: a server without authentication may listen on loopback only "
                "(127.0.0.1, ::1 or localhost). Create a token with 'taskqueue token new "
                "NAME --file tokens.toml', and set TASKQUEUE_TOKENS_FILE to the file"
            )


def notice(settings: Settings, hooks: Hooks) -> str | None:
    """Return what people should know of a server that lets everybody in; ``None`` for one that authenticates."""
    if settings.tokens_file is not None or hooks.wants("authenticate"):
        return None
    return (
        "no authentication: every user of this machine can use this server; other machines "
        "cannot reach it ('taskqueue token new' creates a token)"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
