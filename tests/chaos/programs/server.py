"""A server replica whose backend records deliveries and settlements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.consumer import firing, maintenance
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.logs import set_up_logs
from taskqueue_core.workflows import WORKFLOWS
from taskqueue_server.process.serve import ServerProcess
from tests.chaos.history import Log, What
from tests.chaos.points import PointedBackend, Points
from tests.chaos.programs.common import Setup
from tests.chaos.programs.noted import NotedBackend


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Run the server until SIGTERM, which the server handles itself, so ``over`` is not used."""
    del over
    set_up_logs()
    settings = load_settings(Settings)
    maintenance._EVERY = setup.housekeeping
    if setup.polls:
        firing._POLL_SECONDS = setup.housekeeping / 2
    stored: Any = open_backend(setup.word, settings).inner
    if setup.pointed:
        stored = PointedBackend(stored, Points(Path(setup.log).parent), log)
    noted = NotedBackend(stored, log, unnoted=[WORKFLOWS])
    backend = InstrumentedBackend(noted, Hooks())

    def ready(url: str) -> None:
        log.note(What.PHASE, name="serving", note=url)

    await ServerProcess(backend, settings, on_ready=ready).run()
