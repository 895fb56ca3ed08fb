"""A server replica whose backend records deliveries and settlements."""

from __future__ import annotations

import asyncio

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.loading import load_backend
from taskqueue_core.logs import set_up_logs
from taskqueue_server.process.serve import ServerProcess
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup
from tests.chaos.programs.noted import NotedBackend


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Run the server until SIGTERM, which the server handles itself, so ``over`` is not used."""
    del over
    set_up_logs()
    backend = InstrumentedBackend(NotedBackend(load_backend(setup.word), log), Hooks())

    def ready(url: str) -> None:
        log.note(What.PHASE, name="serving", note=url)

    await ServerProcess(backend, load_settings(Settings), on_ready=ready).run()
