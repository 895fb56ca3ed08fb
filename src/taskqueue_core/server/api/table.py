"""The table of all operations of the HTTP API, in the order in which its description lists them."""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.responses import Response

from taskqueue_core.server.api import (
    batch,
    dead_letters,
    lookups,
    migration,
    queues,
    scaling,
    settings,
    system,
    tasks,
)
from taskqueue_core.server.api.openapi import document
from taskqueue_core.server.api.operations import Call, Operation, answer
from taskqueue_core.server.hub import VERSION
from taskqueue_core.server.sockets import asyncapi

__all__ = ["OPERATIONS"]


async def describe(call: Call) -> Response:
    """Return this description."""
    return answer(_described(open_to_all=not call.hub.authenticates))


@cache
def _described(*, open_to_all: bool) -> dict[str, Any]:
    return document(OPERATIONS, VERSION, open_to_all=open_to_all)


async def describe_socket(_: Call) -> Response:
    """Return the description of the workers' socket, as AsyncAPI 3.1."""
    return answer(_socket_described())


@cache
def _socket_described() -> dict[str, Any]:
    return asyncapi.document(VERSION)


OPERATIONS = (
    *batch.OPERATIONS,
    *tasks.OPERATIONS,
    *lookups.OPERATIONS,
    *queues.OPERATIONS,
    *settings.OPERATIONS,
    *dead_letters.OPERATIONS,
    *system.OPERATIONS,
    *migration.OPERATIONS,
    *scaling.OPERATIONS,
    Operation(
        method="GET", path="/v1/openapi.json", handler=describe, answers={200: dict[str, Any]}
    ),
    Operation(
        method="GET",
        path="/v1/asyncapi.json",
        handler=describe_socket,
        answers={200: dict[str, Any]},
    ),
)
