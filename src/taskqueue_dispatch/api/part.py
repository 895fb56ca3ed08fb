"""The part of the server that the dispatcher is: see `taskqueue_core.server.parts`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from taskqueue_core.server.hub import Hub
from taskqueue_core.server.parts import Part
from taskqueue_dispatch.api import callbacks, configs, endpoints, jobs, letters
from taskqueue_dispatch.api.calls import NAME
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.page import LINKS, PAGES, TEMPLATES
from taskqueue_dispatch.service import Dispatcher

__all__ = ["OPERATIONS", "TAGS", "part"]

OPERATIONS = (
    *jobs.OPERATIONS,
    *callbacks.OPERATIONS,
    *endpoints.OPERATIONS,
    *configs.OPERATIONS,
    *letters.OPERATIONS,
)
TAGS = {
    "jobs": "Submit jobs to the servers of a model, look them up, wait for them and cancel them.",
    "models": "Which servers run a model, and how its jobs are done.",
    "failed jobs": "Jobs that were given up: the dead letters of all models.",
}


def part(settings: DispatchSettings | None = None) -> Part:
    """Return the part; ``settings`` are read where none are given, once a server is made with it."""

    def opened(hub: Hub) -> AbstractAsyncContextManager[object]:
        return Dispatcher(hub.backend, settings, housekeeping=False)

    return Part(
        name=NAME,
        open=opened,
        operations=OPERATIONS,
        tags=TAGS,
        pages=PAGES,
        links=LINKS,
        templates=TEMPLATES,
    )
