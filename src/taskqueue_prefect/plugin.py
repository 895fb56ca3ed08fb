"""The plugin, loaded by Prefect's entry point. Every process that imports Prefect imports it, so it must be small.

Without a configured backend it does nothing. Otherwise it registers `taskqueue_prefect.patches` for four of the
server's modules. A process that imports none of these only has one more import hook.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pluggy

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"

# Prefect's marker, since its first release with plugins
hookimpl = pluggy.HookimplMarker("prefect-experimental")


@hookimpl
def setup_environment(ctx: Any = None) -> None:  # noqa: ARG001 - Prefect passes it
    """Make Prefect's server use the configured queue. Idempotent, because Prefect calls it more than once."""
    install()


def install() -> bool:
    """Install the plugin; return whether a backend is configured."""
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
