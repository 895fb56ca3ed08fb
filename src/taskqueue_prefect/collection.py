"""Imported by Prefect's server as it starts, plugins or not: a last look at whether the plugin has done its work."""

from __future__ import annotations

import logging
import os
import sys

from taskqueue_core.config import load_settings
from taskqueue_prefect.settings import BACKEND, PrefectSettings, environment

__all__: list[str] = []

_SERVER = "prefect.server.api.server"
_REFUSED = 3
"""the exit code of a server that does not start"""


def _look() -> None:
    if _SERVER not in sys.modules:
        return  # a client
    told = {**environment(), **os.environ}
    server = sys.modules[_SERVER]
    if not told.get(BACKEND) or hasattr(server, "taskqueue_stock"):
        return
    text = (
        f"{BACKEND} is set, but this server uses Prefect's own queue of background tasks, "
        "as its plugins are not enabled or did not run: set PREFECT_PLUGINS_ENABLED=true"
    )
    logging.getLogger("prefect.taskqueue").error(text)
    if load_settings(PrefectSettings).strict:
        # Who imports this only prints what is raised, and waits for threads of Prefect when it is to exit.
        sys.stderr.flush()
        os._exit(_REFUSED)


_look()
