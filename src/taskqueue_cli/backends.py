"""Which backend a command uses: one that this process can share, or else the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import ObservedBackend
from taskqueue_core.plugins import load_plugins
from taskqueue_core.queue import open_backend

__all__ = ["REACH", "ServerUrl", "opened"]

REACH = (
    "Uses the configured backend if processes can share it (TASKQUEUE_BACKEND), otherwise a running "
    "server: the memory backend, for one, lives inside the server's process."
)
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Go through the server there, whatever the backend. Without it: TASKQUEUE_SERVER_URL.",
        show_default=False,
    ),
]


@asynccontextmanager
async def opened(server: str | None) -> AsyncIterator[Backend]:
    """Open the backend that a command is to use, and close it."""
    backend = await _choose(load_settings(Settings), server)
    try:
        yield backend
    finally:
        await backend.aclose()


async def _choose(settings: Settings, server: str | None) -> Backend:
    if server is None:
        backend = open_backend(settings=settings)
        if backend.capabilities.shared:
            return backend
        await backend.aclose()
    from taskqueue_remote import RemoteBackend  # noqa: PLC0415 - an HTTP client takes its time

    hooks = Hooks()
    load_plugins(hooks, allow=settings.plugins_allow, deny=settings.plugins_deny)
    token = settings.token.get_secret_value() if settings.token else None
    remote = RemoteBackend(server or settings.server_url, token, tls_ca=settings.tls_ca)
    return ObservedBackend(remote, hooks)
