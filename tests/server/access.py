"""Tokens for tests, in files, and servers that ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth.tokens import hashed
from tests.server.support import Running, running

ADMIN = "tq_admin-of-everything"
A = "tq_works-with-a-alone"
B = "tq_works-with-b-alone"
ALL = ("publish", "consume", "admin")


def entry(
    token: str,
    name: str = "n",
    verbs: Iterable[str] = ALL,
    keys: Iterable[str] = ("*",),
    **more: Any,
) -> dict[str, Any]:
    """A row of the file."""
    row = {"name": name, "sha256": hashed(token).hex(), "verbs": [*verbs], "keys": [*keys]}
    return row | more


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Write a file of tokens, readable for its owner alone."""
    lines = []
    for row in rows:
        lines.append("[[token]]")
        lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in row.items()]
    made = path.with_suffix(".new")
    made.touch(mode=0o600)
    made.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made.replace(path)


def everybody(path: Path) -> Path:
    """Write a file with an admin of all keys, one who may do everything with ``a``, and one with ``b``."""
    return write(
        path,
        entry(ADMIN, "admin"),
        entry(A, "a", keys=("a",)),
        entry(B, "b", keys=("b",)),
    )


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def guarded(path: Path, **changes: Any) -> AsyncIterator[Running]:
    """Run a server that asks for tokens."""
    async with running(tokens_file=path, **changes) as it:
        yield it


def spoil(path: Path, text: str | None) -> None:
    """Put something else in the file, or remove it."""
    path.write_text(text, "utf-8") if text else path.unlink()


class Plugin:
    """Knows one token, for some time."""

    TASKQUEUE_HOOK_API = 1

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or Identity(name="good")
        self.known = True
        self.asked = 0

    @hookimpl
    def authenticate(self, token: str | None) -> Identity | None:
        """Say who it is."""
        self.asked += 1
        return self.identity if token == "good" and self.known else None

    def backend(self) -> InstrumentedBackend:
        """A backend with this plugin."""
        hooks = Hooks()
        hooks.register(self)
        return InstrumentedBackend(MemoryBackend(), hooks)
