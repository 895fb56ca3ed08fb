"""All operations of the HTTP API, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.responses import Response

from taskqueue_server.api import (
    batch,
    dead_letters,
    migration,
    queues,
    settings,
    system,
    tasks,
)
from taskqueue_server.context.server import VERSION
from taskqueue_server.routing.extensions import Extension
from taskqueue_server.routing.openapi import document
from taskqueue_server.routing.operations import Operation, RequestContext, answer
from taskqueue_server.worker_socket import asyncapi


async def describe(call: RequestContext) -> Response:
    """Return the OpenAPI document of this API."""
    known: Description = call.request.app.state.description
    return answer(known.document(open_to_all=not call.context.access.authenticates))


class Description:
    """The API documentation of a server and its extensions."""

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self._operations = (
            *OPERATIONS,
            *(operation for part in extensions for operation in part.operations),
        )
        self._tags = {name: text for part in extensions for name, text in part.tags.items()}
        self._document: dict[bool, dict[str, Any]] = {}

    def document(self, *, open_to_all: bool) -> dict[str, Any]:
        """Return the OpenAPI document, which is built on the first call."""
        if open_to_all not in self._document:
            self._document[open_to_all] = document(
                self._operations, VERSION, open_to_all=open_to_all, tags=self._tags
            )
        return self._document[open_to_all]


async def describe_socket(_: RequestContext) -> Response:
    """Return the description of the workers' WebSocket, as AsyncAPI 3.1."""
    return answer(_socket_described())


@cache
def _socket_described() -> dict[str, Any]:
    return asyncapi.document(VERSION)


OPERATIONS = (
    *batch.OPERATIONS,
    *tasks.OPERATIONS,
    *tasks.LOOKUPS,
    *queues.OPERATIONS,
    *settings.OPERATIONS,
    *dead_letters.OPERATIONS,
    *system.OPERATIONS,
    *migration.OPERATIONS,
    Operation("GET", "/v1/openapi.json", describe, {200: dict[str, Any]}, id="table_describe"),
    Operation(
        "GET",
        "/v1/asyncapi.json",
        describe_socket,
        {200: dict[str, Any]},
        id="table_describe_socket",
    ),
)
