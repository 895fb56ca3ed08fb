"""The dispatcher as an extension of the server: see `taskqueue_server.routing.extensions`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from taskqueue_dispatch.api import callbacks, configs, dead_letters, endpoints, jobs
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.dashboard.pages import LINKS, PAGES, TEMPLATES
from taskqueue_dispatch.handler_helpers import NAME
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.context.server import ServerContext
from taskqueue_server.routing.extensions import Extension

OPERATIONS = (
    *jobs.OPERATIONS,
    *callbacks.OPERATIONS,
    *endpoints.OPERATIONS,
    *configs.OPERATIONS,
    *dead_letters.OPERATIONS,
)
TAGS = {
    "jobs": "Submit jobs to the servers of a model, look them up, wait for them and cancel them.",
    "models": "The servers of each model, and how its jobs are executed.",
    "failed jobs": "The dead letters of all models.",
}


def extension(settings: DispatchSettings | None = None) -> Extension:
    """Return the extension that adds the dispatcher to a server.

    If ``settings`` is None, the settings are loaded when a server with the extension starts.
    """

    def opened(context: ServerContext) -> AbstractAsyncContextManager[object]:
        return Dispatcher(context.backend, settings, maintenance=False)

    return Extension(
        name=NAME,
        open=opened,
        operations=OPERATIONS,
        tags=TAGS,
        pages=PAGES,
        links=LINKS,
        templates=TEMPLATES,
    )
