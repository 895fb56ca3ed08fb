"""Helpers for tests of authentication: tokens, token files, and servers that require a token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth.tokens import VERBS, hashed
from tests.server.support import Running, running

ADMIN = "tq_admin-of-everything"
A = "tq_works-with-a-alone"
B = "tq_works-with-b-alone"
ALL = VERBS


def entry(
    token: str,
    name: str = "n",
    verbs: Iterable[str] = ALL,
    keys: Iterable[str] = ("*",),
    **more: Any,
) -> dict[str, Any]:
    """Return one entry of a token file."""
    row = {"name": name, "sha256": hashed(token).hex(), "verbs": [*verbs], "keys": [*keys]}
    return row | more


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Write a token file that only its owner can read."""
    lines = []
    for row in rows:
        lines.append("[[token]]")
        lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in row.items()]
    made = path.with_suffix(".new")
    made.touch(mode=0o600)
    made.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made.replace(path)


def everybody(path: Path) -> Path:
    """Write a token file for an admin of all keys, an owner of key ``a`` and an owner of key ``b``."""
    return write(
        path,
        entry(ADMIN, "admin"),
        entry(A, "a", keys=("a",)),
        entry(B, "b", keys=("b",)),
    )


def bearer(token: str) -> dict[str, str]:
    """Return the Authorization header that carries a token."""
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def guarded(path: Path, **changes: Any) -> AsyncIterator[Running]:
    """Run a server that requires tokens."""
    async with running(tokens_file=path, **changes) as it:
        yield it


def spoil(path: Path, text: str | None) -> None:
    """Overwrite the token file with other text, or delete the file if ``text`` is None."""
    path.write_text(text, "utf-8") if text else path.unlink()


class Plugin:
    """An authentication plugin that accepts a single token until the test revokes it."""

    TASKQUEUE_HOOK_API = 1

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or Identity(name="good")
        self.known = True
        self.asked = 0

    @hookimpl
    def authenticate(self, token: str | None) -> Identity | None:
        """Return the identity of the token, or None if the token is not accepted."""
        self.asked += 1
        return self.identity if token == "good" and self.known else None

    def backend(self) -> InstrumentedBackend:
        """Return a backend with this authentication plugin."""
        hooks = Hooks()
        hooks.register(self)
        return InstrumentedBackend(MemoryBackend(), hooks)
