"""Sessions of the dashboard, which all server processes and replicas share through the store.

The cookie of a session is a random secret. The store keeps the token, encrypted with that secret, under the secret's
hash: neither the cookie nor the store alone reveals the token. Each session is a document of the slot pool, because
these documents are the only small values that a backend shares. A backend without slots keeps sessions per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping

import msgspec

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import has, slots_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import SESSION_DOCUMENTS

SESSION_SECONDS = 24 * 3600.0
"""maximum duration of a session"""
MAX_SESSIONS = 200
"""maximum number of sessions of a store; a further sign-in ends the oldest session"""
_FRESH_SECONDS = 1.0
"""age up to which a process relies on the sessions that it has read"""
_PAUSE_SECONDS = 0.1
"""minimum time between two reads, so that unknown cookies cannot load the store"""
_READ_SECONDS = 2.0
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_log = logging.getLogger("taskqueue.server.access")


class _Record(msgspec.Struct, frozen=True):
    expires_at: float
    token: bytes
    """the encrypted token"""


class Session(msgspec.Struct, frozen=True):
    """The session of a request."""

    name: str
    """name of its document"""
    token: str

    def __repr__(self) -> str:
        """Return no part of the session, so that the token does not appear in logs."""
        return "Session()"


class Sessions:
    """The sessions of a store. Each server process has one instance, with a copy of the sessions that it has read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pool = slots_of(backend) if has(backend, Capability.SLOTS) else None
        self._records: dict[str, _Record] = {}
        self._read_at = float("-inf")
        """time at which the last read began, on the clock of the event loop"""
        self._failure: str | None = None
        """error of the last read"""
        self._reading = asyncio.Lock()

    async def start(self, token: str) -> str:
        """Start a session with a valid token, and return its secret. Expired sessions are deleted."""
        secret = secrets.token_urlsafe(32)
        now = self._backend.now()
        record = _Record(now + SESSION_SECONDS, _crypt(secret, token.encode()))
        async with self._reading:
            await self._read()
            oldest = sorted(self._records, key=lambda name: self._records[name].expires_at)
            excess = len(oldest) - MAX_SESSIONS + 1
            for number, name in enumerate(oldest):
                if number < excess or self._records[name].expires_at <= now:
                    await self._write(name, None)
            await self._write(_name(secret), record)
        return secret

    async def find(self, secret: str | None) -> Session | None:
        """Return the session with this secret, or ``None`` if there is none or it has ended.

        Raises `BackendUnavailable` if the session is not known and the store does not respond.
        """
        if secret is None or not _SECRET.fullmatch(secret):
            return None
        name = _name(secret)
        await self.refresh(name)
        if not self.is_open(name):
            return None
        try:
            return Session(name, _crypt(secret, self._records[name].token).decode())
        except UnicodeDecodeError:
            return None

    async def end(self, secret: str | None) -> None:
        """End a session: other processes refuse its cookie after at most about a second. Idempotent."""
        session = await self.find(secret)
        if session is not None:
            async with self._reading:
                await self._write(session.name, None)

    def is_open(self, name: str) -> bool:
        """Return whether the session was open at the last read, and has not expired."""
        record = self._records.get(name)
        return record is not None and self._backend.now() < record.expires_at

    async def refresh(self, name: str) -> None:
        """Read the sessions if the copy is old, or lacks the session ``name``, which a replica may have started.

        If the store does not respond, known sessions stay open. Otherwise raises `BackendUnavailable`.
        """
        asked_at = asyncio.get_running_loop().time()
        if self._read_at + _FRESH_SECONDS > asked_at and name in self._records:
            return
        async with self._reading:
            if self._read_at < asked_at:
                with contextlib.suppress(BackendUnavailable):
                    await self._read()
            if self._failure is not None and name not in self._records:
                raise BackendUnavailable(self._failure)

    async def _read(self) -> None:
        """Replace the copy. Call this with the lock, so that all waiting requests share one read."""
        if self._pool is None:
            return
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._read_at + _PAUSE_SECONDS - loop.time())
        self._read_at = loop.time()
        try:
            async with asyncio.timeout(_READ_SECONDS):
                documents = await self._pool.documents()
        except (TimeoutError, BackendUnavailable) as error:
            self._failure = str(error) or "the sessions could not be read in time"
            raise BackendUnavailable(self._failure) from error
        self._failure = None
        self._records = _decoded(documents)

    async def _write(self, name: str, record: _Record | None) -> None:
        if self._pool is not None:
            encoded = None if record is None else msgspec.json.encode(record)
            await self._pool.configure(name, encoded)
        if record is None:
            self._records.pop(name, None)
        else:
            self._records[name] = record


def _decoded(documents: Mapping[str, bytes]) -> dict[str, _Record]:
    records = {}
    for name, text in documents.items():
        if name.startswith(SESSION_DOCUMENTS):
            try:
                records[name] = msgspec.json.decode(text, type=_Record)
            except msgspec.DecodeError:
                _log.error("a session in the store cannot be read; it is ignored")
    return records


def _name(secret: str) -> str:
    return SESSION_DOCUMENTS + hashlib.sha256(secret.encode()).hexdigest()


def _crypt(secret: str, text: bytes) -> bytes:
    """Encrypt or decrypt with a key stream. Each secret encrypts one token only, so no part of the stream is reused."""
    stream = hashlib.shake_256(b"taskqueue session " + secret.encode()).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, stream, strict=True))
