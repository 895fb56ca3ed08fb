"""A dispatcher whose backend records deliveries and settlements of jobs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from taskqueue_core.config import load_settings
from taskqueue_core.consumer import maintenance
from taskqueue_core.loading import load_backend
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.service import Dispatcher
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup
from tests.chaos.programs.noted import NotedBackend


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Dispatch jobs until SIGTERM."""
    maintenance._EVERY = setup.housekeeping
    async with contextlib.aclosing(load_backend(setup.word)) as inner:
        backend: Any = NotedBackend(inner, log, unnoted=[CALLBACKS])
        async with Dispatcher(backend, load_settings(DispatchSettings)):
            log.note(What.PHASE, name="serving")
            await over.wait()
