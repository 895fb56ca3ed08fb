"""The tokens file: hashes, rights and limits of tokens. The tokens themselves are not stored."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.hooks import Identity
from taskqueue_core.limits import check_name, check_time, kind_of

VERBS = ("publish", "consume", "observe", "admin")
MAX_ENTRIES = 1000
"""maximum number of entries; the token of each request is compared with all of them"""
_TOKEN = 1024
"""maximum number of characters of a token"""
_PATTERNS = 1000
_BYTES = 4 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBERS = 1_000_000
"""highest rate, burst and number of connections that an entry may set"""
_FIELDS = frozenset(
    {"name", "sha256", "verbs", "keys", "expires_at", "rate", "burst", "connections"}
)


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the tokens file: the hash, name, rights, expiry and limits of a token."""

    name: str
    sha256: bytes
    verbs: frozenset[str]
    keys: tuple[str, ...]
    expires_at: float | None = None
    """time of expiry in Unix seconds; ``None`` if the token does not expire"""
    rate: float | None = None
    burst: float | None = None
    connections: int | None = None

    @property
    def identity(self) -> Identity:
        """The identity of a client that sends the token."""
        return Identity(**{field: getattr(self, field) for field in Identity.__struct_fields__})

    def __repr__(self) -> str:
        """Return the name only, so that the hash does not appear in logs."""
        return f"TokenEntry(name={self.name!r})"

    @property
    def short(self) -> str:
        """The first 8 hex digits of the hash, which distinguish entries with the same name."""
        return self.sha256.hex()[:8]

    def lives(self, now: float) -> bool:
        """Return whether the token is still valid at ``now``, in Unix seconds."""
        return self.expires_at is None or now < self.expires_at


def hashed(token: str) -> bytes:
    """Return the SHA-256 hash of a token, which is stored instead of the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


class Tokens:
    """The entries of the tokens file at the time when it was read. Several entries may have the same name."""

    def __init__(self, entries: Iterable[TokenEntry] = ()) -> None:
        self.entries = tuple(entries)
        self._identities = tuple(entry.identity for entry in self.entries)

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Read the tokens file at ``path``. Raises `ConfigurationError` if it is unreadable or has an invalid entry."""
        return cls(read_entries(load(path), path))

    def identify(self, token: str | None, now: float) -> Identity | None:
        """Return the identity of a token, or ``None`` if it is not valid at ``now``.

        The token is compared with every entry in constant time, so that the duration reveals nothing about the entries.
        """
        if token is None or len(token) > _TOKEN:
            return None
        shown = hashed(token)
        result = None
        for entry, identity in zip(self.entries, self._identities, strict=True):
            if hmac.compare_digest(entry.sha256, shown) and entry.lives(now):
                result = identity
        return result


def signature(path: Path) -> object:
    """Return a value that changes whenever the file changes; ``None`` if the file is missing or inaccessible."""
    try:
        result = path.stat()
    except OSError:
        return None
    return result.st_mtime_ns, result.st_ctime_ns, result.st_size, result.st_ino


def check_pattern(field: str, pattern: object) -> None:
    """Raise `InvalidInput` unless ``pattern`` is a key, a prefix followed by ``*``, or ``*``."""
    try:
        if pattern != "*":
            check_name(field, pattern.removesuffix("*") if isinstance(pattern, str) else pattern)
    except InvalidInput as error:
        allowed = 'names of queues, prefixes followed by *, or "*"'
        raise InvalidInput(field, error.got, allowed) from None


def read_entries(text: bytes, path: Path) -> tuple[TokenEntry, ...]:
    """Parse the text of the tokens file at ``path``. Raises `ConfigurationError`, which names the path."""
    try:
        decoded = tomllib.loads(text.decode())
    except UnicodeDecodeError:
        raise _wrong(path, "it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        # The parser's message is safe to show: it contains a position and at most one character of the file.
        raise _wrong(path, f"it is not TOML: {error}") from None
    rows = decoded.pop("token", [])
    if decoded or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _wrong(path, "it may contain [[token]] tables only")
    if len(rows) > MAX_ENTRIES:
        raise _wrong(path, f"it has more than {MAX_ENTRIES} entries")
    entries = tuple(_entry(row, number, path) for number, row in enumerate(rows, 1))
    if len({entry.sha256 for entry in entries}) < len(entries):
        raise _wrong(path, "two entries have the same hash; remove one of them")
    return entries


def load(path: Path) -> bytes:
    """Return the content of the tokens file. Raises `ConfigurationError` if it is unreadable or open to other users."""
    try:
        # Without O_NONBLOCK, opening a named pipe would block until another process opens it for writing.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            result = os.fstat(file.fileno())
            if not stat.S_ISREG(result.st_mode):
                raise _wrong(path, "it is not a regular file")
            if _is_open(result):
                mode = stat.S_IMODE(result.st_mode)
                raise _wrong(
                    path,
                    f"other users may access it (mode {mode:04o}); run chmod 600 on it",
                )
            return file.read(_BYTES)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise _wrong(path, f"it cannot be read: {reason}") from None


def _is_open(result: os.stat_result) -> bool:
    # Other users with access could read hashes or add tokens. The group may read a file that root owns, because
    # Kubernetes mounts secrets in this way.
    given = stat.S_IRGRP if result.st_uid == 0 else 0
    return bool(result.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~given)


def _entry(row: Mapping[str, Any], number: int, path: Path) -> TokenEntry:
    name, shown = row.get("name"), f"token {number}"
    try:
        check_name("name", name)
        shown = f"token {number} ({name})"
        return _checked(row)
    except InvalidInput as error:
        raise _wrong(path, f"{shown}: {error.field} must be {error.allowed}") from None


def _checked(row: Mapping[str, Any]) -> TokenEntry:
    if unknown := sorted(row.keys() - _FIELDS):
        names = ", ".join(repr(field[:40]) for field in unknown[:5])
        allowed = f"one of the fields {', '.join(sorted(_FIELDS))}"
        raise InvalidInput(names, "unknown fields", allowed)
    digest = row.get("sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest.lower()):
        allowed = "the SHA-256 of the token, as 64 hexadecimal digits"
        raise InvalidInput("sha256", kind_of(digest), allowed)
    limits = {field: row.get(field) for field in ("rate", "burst", "connections")}
    entry = TokenEntry(
        name=row["name"],
        sha256=bytes.fromhex(digest),
        verbs=frozenset(_verbs(row.get("verbs"))),
        keys=_keys(row.get("keys")),
        expires_at=_expiry(row.get("expires_at")),
        **limits,
    )
    check_limits(**limits)
    return entry


def check_limits(rate: object, burst: object, connections: object) -> None:
    """Raise `InvalidInput` for an invalid value, or a burst without a rate. ``None`` means that a value is not set."""
    per_second = "a number of requests and tasks per second, from 1/3600 (one per hour)"
    for field, value, kind, lowest, what in (
        ("rate", rate, float, 1 / 3600, per_second),
        ("burst", burst, float, 1, "a number from 1"),
        ("connections", connections, int, 1, "a whole number from 1"),
    ):
        number = isinstance(value, int | kind) and not isinstance(value, bool)
        if value is not None and not (number and lowest <= value <= _NUMBERS):  # type: ignore[operator]
            raise InvalidInput(field, kind_of(value), f"{what} to {_NUMBERS}")
    if burst is not None and rate is None:
        raise InvalidInput("burst", "a burst without a rate", "set together with a rate")


def _verbs(value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(verb in VERBS for verb in value):
        allowed = f"an array of one or more of {', '.join(VERBS)}"
        raise InvalidInput("verbs", kind_of(value), allowed)
    return value


def _keys(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _PATTERNS:
        allowed = f'an array of 1 to {_PATTERNS} keys; "*" for all, "mail-*" for a prefix'
        raise InvalidInput("keys", kind_of(value), allowed)
    for pattern in value:
        check_pattern("keys", pattern)
    return tuple(value)


def _expiry(value: object) -> float | None:
    if value is None:
        return None
    try:
        at = seconds_of(value)
        check_time("expires_at", at)
    except (ValueError, OverflowError):
        allowed = "Unix seconds, or a time such as 2027-01-31T12:00:00Z (UTC by default)"
        raise InvalidInput("expires_at", kind_of(value), allowed) from None
    return at


def seconds_of(value: object) -> float:
    """Convert Unix seconds, a date, a datetime or ISO 8601 text to Unix seconds. Raises `ValueError`.

    A value without a time zone is taken as UTC.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        raise ValueError  # noqa: TRY004 - callers handle only ValueError
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


def _wrong(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"the tokens file {path}: {why}")
