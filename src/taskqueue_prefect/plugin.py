"""The plugin, by Prefect's own entry point. Every process that imports Prefect imports it: so it takes next to nothing.

Where no backend is chosen it does nothing. Otherwise it says what becomes of four of the server's modules when they
are imported: `taskqueue_prefect.patches`. A process that imports none of them pays for an entry in a list.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pluggy

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"

# Prefect's marker, from the first release with plugins on
hookimpl = pluggy.HookimplMarker("prefect-experimental")


@hookimpl
def setup_environment(ctx: Any = None) -> None:  # noqa: ARG001 - what Prefect gives
    """Have Prefect's server use the queue that is configured. Idempotent, as Prefect calls it more than once."""
    install()


def install() -> bool:
    """Do what the plugin does; say whether a backend is chosen."""
    from taskqueue_prefect.settings import BACKEND, environment

    os.environ.update(environment())
    if not os.environ.get(BACKEND):
        return False
    from taskqueue_prefect.import_hooks import after_import

    after_import(dict.fromkeys(_MODULES, _replace))
    return True


_MODULES = (
    "prefect.server.task_queue",
    "prefect.server.models.task_workers",
    "prefect.server.utilities.subscriptions",
    "prefect.server.api.server",
)


def _replace(module: ModuleType) -> None:
    from taskqueue_prefect import patches

    patches.replace(module)
