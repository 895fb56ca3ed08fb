"""A check that the plugin is in use. Prefect's server imports this module at its start, even with plugins disabled."""

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
"""exit code of a server that refuses to start"""


def _check_strict() -> None:
    if _SERVER not in sys.modules:
        return  # this process is a client, not a server
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
    """Install the plugin now. If Prefect is first imported in a running event loop, it does not load its plugins."""
    from taskqueue_prefect.context import Host
    from taskqueue_prefect.lifespan import serving
    from taskqueue_prefect.patches import faults
    from taskqueue_prefect.plugin import install

    async def serve() -> None:
        try:
            async with serving(Host.of_this_loop(), faults()):
                await asyncio.Event().wait()  # runs until the event loop ends
        except TaskQueueError as error:
            LOG.error("this server cannot use the configured queue: %s", error)
            _refuse()

    install()
    _background_tasks.append(asyncio.get_running_loop().create_task(serve()))


def _refuse() -> None:
    # Exit directly, because Prefect would only print an exception that this module raises, and because a normal exit
    # waits for Prefect's threads.
    sys.stderr.flush()
    os._exit(_REFUSED)


_background_tasks: list[asyncio.Task[None]] = []
_check_strict()
