"""All operations of the HTTP API, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from starlette.responses import Response

from taskqueue_server.api import (
    audit,
    batch,
    dead_letters,
    events,
    listing,
    lookups,
    migration,
    queues,
    schedules,
    settings,
    system,
    tasks,
    tickets,
    workflows,
)
from taskqueue_server.context.server import VERSION
from taskqueue_server.routing.extensions import Extension
from taskqueue_server.routing.openapi import document
from taskqueue_server.routing.operations import Operation, RequestContext, answer
from taskqueue_server.worker_socket import asyncapi


async def describe(call: RequestContext) -> Response:
    """Return the OpenAPI document of this API."""
    describe_api = call.request.app.state.describe_api
    return answer(describe_api(open_to_all=not call.context.access.authenticates))


def api_describer(extensions: Sequence[Extension]) -> Callable[..., dict[str, Any]]:
    """Return a function of ``open_to_all`` that returns the OpenAPI document, with the operations of the extensions.

    The function builds the document only once for each value of ``open_to_all``.
    """
    added = (operation for extension in extensions for operation in extension.operations)
    tags = {name: text for extension in extensions for name, text in extension.tags.items()}
    return cache(partial(document, (*OPERATIONS, *added), VERSION, tags=tags))


async def describe_socket(_: RequestContext) -> Response:
    """Return the description of the workers' WebSocket, as AsyncAPI 3.1."""
    return answer(asyncapi.document(VERSION))


OPERATIONS = (
    *batch.OPERATIONS,
    *tasks.OPERATIONS,
    *lookups.OPERATIONS,
    *listing.OPERATIONS,
    *events.OPERATIONS,
    *tickets.OPERATIONS,
    *queues.OPERATIONS,
    *settings.OPERATIONS,
    *schedules.OPERATIONS,
    *workflows.OPERATIONS,
    *dead_letters.OPERATIONS,
    *system.OPERATIONS,
    *audit.OPERATIONS,
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
