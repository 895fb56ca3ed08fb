"""Imported by Prefect's server as it starts, plugins or not: a last look at whether the plugin has done its work."""

from __future__ import annotations

import asyncio
import os
import sys

from taskqueue_core.config import load_settings
from taskqueue_core.errors import TaskQueueError
from taskqueue_prefect.context import LOG
from taskqueue_prefect.settings import BACKEND, PrefectSettings, environment

_SERVER = "prefect.server.api.server"
_ENABLED = "PREFECT_PLUGINS_ENABLED"
_REFUSED = 3
"""the exit code of a server that does not start"""


def _check_strict() -> None:
    if _SERVER not in sys.modules:
        return  # a client
    values = {**environment(), **os.environ}
    if not values.get(BACKEND) or hasattr(sys.modules[_SERVER], "taskqueue_stock"):
        return
    from prefect.settings import get_current_settings

    if get_current_settings().plugins.enabled:
        _install_late()
        return
    LOG.error(
        "%s is set, but this server uses Prefect's own task queue, "
        "because its plugins are not enabled: set %s=true",
        BACKEND,
        _ENABLED,
    )
    if load_settings(PrefectSettings).strict:
        _refuse()


def _install_late() -> None:
    """Do what the plugin has not done: Prefect runs none where it is first imported inside of a running loop."""
    from taskqueue_prefect.context import Host
    from taskqueue_prefect.lifespan import serve_on
    from taskqueue_prefect.patches import faults
    from taskqueue_prefect.plugin import install

    async def serve() -> None:
        try:
            await serve_on(Host.of_this_loop(), faults())
        except TaskQueueError as error:
            LOG.error("this server cannot use the configured queue: %s", error)
            _refuse()

    install()
    _background_tasks.append(asyncio.get_running_loop().create_task(serve()))


def _refuse() -> None:
    # Who imports this only prints what is raised, and waits for threads of Prefect when it is to exit.
    sys.stderr.flush()
    os._exit(_REFUSED)


_background_tasks: list[asyncio.Task[None]] = []
_check_strict()
