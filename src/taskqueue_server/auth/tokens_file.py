"""Add and remove entries of the tokens file. Each change replaces the file atomically, while a lock is held."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_server.auth.tokens import TokenEntry, hashed, load, read_entries

_RANDOM = 32
"""number of random bytes in a token"""
_HEAD = "# Tokens of the server: the hash, rights, limits and expiry of each. The tokens themselves are not stored.\n"
_START = re.compile(r"^(?=[ \t]*\[\[[ \t]*token[ \t]*\]\])", re.MULTILINE)


def new_token() -> str:
    """Return a new random token."""
    return f"tq_{secrets.token_urlsafe(_RANDOM)}"


def add(
    path: Path,
    name: str,
    token: str,
    *,
    verbs: Iterable[str],
    keys: Iterable[str],
    at: float | None = None,
    rate: float | None = None,
    burst: float | None = None,
    connections: int | None = None,
) -> TokenEntry:
    """Append an entry for ``token`` to the tokens file, and return it. Raises `ConfigurationError`.

    The file is created if needed. ``at`` is the time of expiry in Unix seconds; ``None`` means that the token does not
    expire.
    """
    lines: dict[str, object] = {
        "name": name,
        "sha256": hashed(token).hex(),
        "verbs": [*dict.fromkeys(verbs)],
        "keys": [*keys],
    }
    limits = {"rate": rate, "burst": burst, "connections": connections}
    lines |= {field: limit for field, limit in limits.items() if limit is not None}
    text = "".join(
        f"{field} = {msgspec.json.encode(line).decode()}\n" for field, line in lines.items()
    )
    if at is not None:
        text += f"expires_at = {datetime.fromtimestamp(int(at), UTC):%Y-%m-%dT%H:%M:%SZ}\n"
    with _alone(path):
        before = load(path).decode() if path.exists() else _HEAD
        if before and not before.endswith("\n"):
            before += "\n"
        after = f"{before}\n[[token]]\n{text}"
        entry = read_entries(after.encode(), path)[-1]
        _write(path, after)
    return entry


def remove(path: Path, unwanted: Callable[[TokenEntry], bool]) -> tuple[TokenEntry, ...]:
    """Remove the entries of the tokens file for which ``unwanted`` is true; return them. Raises `ConfigurationError`.

    Comments and the other entries are not changed.
    """
    with _alone(path):
        text = load(path)
        result = read_entries(text, path)
        head, *parts = _START.split(text.decode())
        if len(parts) != len(result):
            raise ConfigurationError(
                f"the tokens file {path} has entries that are not [[token]] tables; edit it by hand"
            )
        gone = tuple(entry for entry in result if unwanted(entry))
        retained = [part for part, entry in zip(parts, result, strict=True) if entry not in gone]
        after = "".join((head, *retained))
        if read_entries(after.encode(), path) != tuple(e for e in result if e not in gone):
            raise ConfigurationError(
                f"the tokens file {path} has an unexpected structure; edit it by hand"
            )
        if gone:
            _write(path, after)
    return gone


@contextmanager
def _alone(path: Path) -> Generator[None, None, None]:
    # Lock the folder, because the file itself is replaced.
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _failed(path, error) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            _keep_owner(target, file.fileno())
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise _failed(path, error) from None
    finally:
        draft.unlink(missing_ok=True)


def _keep_owner(target: Path, draft: int) -> None:
    """Give the new file the owner and mode of the old file, if any: the server must still be able to read it."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return
    new = os.fstat(draft)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(draft, old.st_uid, old.st_gid)
    os.fchmod(draft, stat.S_IMODE(old.st_mode))


def _failed(path: Path, error: OSError) -> ConfigurationError:
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return ConfigurationError(f"the tokens file {path} could not be changed: {reason}")
