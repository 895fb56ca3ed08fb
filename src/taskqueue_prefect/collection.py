"""A check that the plugin is in use. Prefect's server imports this module at its start, even with plugins disabled."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from taskqueue_core.errors import TaskQueueError
from taskqueue_prefect.context import LOG
from taskqueue_prefect.settings import BACKEND, STRICT, environment, is_true

_SERVER = "prefect.server.api.server"
_ENABLED = "PREFECT_PLUGINS_ENABLED"
_REFUSED = 3
"""exit code of a server that refuses to start"""


def _check() -> None:
    """Install the plugin where Prefect did not. Refuse a strict server that would use Prefect's own queue."""
    values = {**environment(), **os.environ}
    server = sys.modules.get(_SERVER)
    if server is None or not values.get(BACKEND) or hasattr(server, "taskqueue_stock"):
        return  # a client's process, no queue is configured, or the plugin is already installed
    try:
        if _are_plugins_enabled(values):
            _install_late()
            return
        LOG.error(
            "%s is set, but this server uses Prefect's own task queue, "
            "because its plugins are not enabled: set %s=true",
            BACKEND,
            _ENABLED,
        )
    except Exception:  # noqa: BLE001 - no error may leave a strict server with another queue
        # Prefect prints an exception of this module and starts, with its own queue.
        LOG.exception("%s is set, but this server cannot use the queue of this package", BACKEND)
    if is_true(values.get(STRICT, "")):
        _refuse()


def _are_plugins_enabled(values: Mapping[str, str]) -> bool:
    from prefect.settings import get_current_settings

    # Releases before 3.7 read PREFECT_EXPERIMENTS_PLUGINS_ENABLED only, and ignore the documented variable.
    plugins = getattr(get_current_settings(), "plugins", None)
    return is_true(values.get(_ENABLED, "")) if plugins is None else bool(plugins.enabled)


def _install_late() -> None:
    """Install the plugin now.

    Prefect does not load its plugins if it is first imported in a running event loop, nor, before its release 3.7,
    because of the documented variable. It has not served a request yet.
    """
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
_check()
