"""Build the OpenAPI 3.1 document from the operations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel

from taskqueue_server.problems import PROBLEM_TYPE, HttpProblem
from taskqueue_server.routing.bodies import JSON, NDJSON
from taskqueue_server.routing.operations import Operation, Query
from taskqueue_server.routing.schemas import LABEL, NAME

_ABOUT = """Publish tasks and operate queues. Workers use the socket protocol instead.

Errors are problem documents (RFC 9457) with a stable `code`. Publishing, `/health` and `/ready` also have other
bodies for some error statuses. A request that failed with 429 or 503 may be repeated after `Retry-After` seconds.
Lists are paginated: repeat the request with `next` as `after` until the response has no `next`."""
_TAGS = {
    "tasks": "Publish, look up, wait for, cancel and retry tasks.",
    "queues": "Statistics, settings and ledgers of queues; pause, resume and purge them.",
    "schedules": "Tasks that the store publishes at given times.",
    "dead letters": "Tasks that were given up: list, redrive or discard them.",
    "workers": "Workers with an open subscription.",
    "migration": "Moving from one backend to another without downtime.",
    "server": "Health and limits of the server, and descriptions of its interfaces.",
}
_REF = "#/components/schemas/{name}"
_PYDANTIC_REF = "#/components/schemas/{model}"
_COMPONENT_NAMES = {"HttpProblem": "Problem", "MigrationPhase": "Phase", "RetryTaskIn": "AgainIn"}
"""names of components in the OpenAPI document, by class name; all other components are named after their class"""
_REFERENCES = {
    _REF.format(name=old): _REF.format(name=name) for old, name in _COMPONENT_NAMES.items()
}
_TEXT = {"type": "string"}
_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "taskqueue-time": ("the store's time, in Unix seconds", {"type": "number"}),
    "Retry-After": (
        "seconds after which the request may be repeated",
        {"type": "integer", "minimum": 1},
    ),
    "Link": ('URL of the next page, as `rel="next"`, if there is one', _TEXT),
    "ETag": ("the settings' version, for `If-Match`", {"type": "string", "pattern": '^"[0-9]+"$'}),
    "WWW-Authenticate": ("the required authentication scheme", _TEXT),
    "Connection": ("`close`: the server does not read the rest of the request", _TEXT),
}
_SOMETIMES = ("Link", "Connection", "Retry-After")
_OF_STATUS = {
    401: ("WWW-Authenticate",),
    408: ("Connection",),
    413: ("Connection",),
    415: ("Connection",),
    429: ("Retry-After",),
    503: ("Retry-After",),
}
_NEEDS_BODY = (400, 408, 413, 415)
_NEEDS_TOKEN = (401, 403, 429, 503)
_ALWAYS = (403, 421, 422, 500)
_IN_PATH = re.compile(r"{(\w+)(:path)?}")
_PATTERNED = {
    "moved_to": (),
    "bound_to": ("items",),
    "paused_tenants": ("items",),
    "weights": ("propertyNames",),
}


def document(
    operations: Sequence[Operation],
    version: str,
    *,
    open_to_all: bool = True,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI document of the operations. With ``open_to_all``, it declares that no token is required.

    ``tags`` maps each additional tag to its description.
    """
    kinds = [HttpProblem, *(kind for operation in operations for kind in _kinds(operation))]
    schemas, components = _schemas(kinds)
    _name_settings(components["QueueSettings"]["properties"])
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        methods = paths.setdefault(operation.address, {})
        methods[operation.method.lower()] = _describe(operation, schemas, open_to_all=open_to_all)
    used = {operation.tag for operation in operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "taskqueue",
            "version": version,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "this server"}],
        "tags": [
            {"name": name, "description": text}
            for name, text in {**_TAGS, **(tags or {})}.items()
            if name in used
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "required if the server uses tokens; a token grants certain verbs for certain keys",
                }
            },
            "headers": {
                name: {
                    "description": text,
                    "required": name not in _SOMETIMES,
                    "schema": schema,
                }
                for name, (text, schema) in _HEADERS.items()
            },
        },
    }


def _kinds(operation: Operation) -> list[Any]:
    kinds: list[Any] = []
    for kind in (operation.body, *operation.answers.values()):
        kinds += kind if isinstance(kind, tuple) else [kind]
    return [kind for kind in kinds if kind is not None]


def _schema(kind: Any, schemas: dict[int, dict[str, Any]]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, tuple):
        return {"anyOf": [schemas[id(item)] for item in kind]}
    return schemas[id(kind)]


def _schemas(kinds: Sequence[Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the schema of each type by the ``id()`` of the type, and the components to which these schemas refer."""
    ours = [kind for kind in kinds if not _is_pydantic(kind)]
    described, components = msgspec.json.schema_components(ours, ref_template=_REF)
    schemas = {id(kind): schema for kind, schema in zip(ours, described, strict=True)}
    for kind in kinds:
        if _is_pydantic(kind):
            schema = kind.model_json_schema(ref_template=_PYDANTIC_REF)
            components.update(schema.pop("$defs", {}))
            components[kind.__name__] = schema
            schemas[id(kind)] = {"$ref": _REF.format(name=kind.__name__)}
    for old, name in _COMPONENT_NAMES.items():
        if old in components:
            components[name] = {**components.pop(old), "title": name}
    return _with_names(schemas), _with_names(components)


def _with_names(schema: Any) -> Any:
    """Return a copy of the schema whose references are renamed according to `_COMPONENT_NAMES`."""
    if isinstance(schema, list):
        return [_with_names(item) for item in schema]
    if not isinstance(schema, dict):
        return _REFERENCES.get(schema, schema) if isinstance(schema, str) else schema
    return {key: _with_names(value) for key, value in schema.items()}


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _name_settings(properties: dict[str, Any]) -> None:
    """Add the pattern of valid names to the settings that contain names, because the model's schema lacks it."""
    for field, inside in _PATTERNED.items():
        position = properties[field]
        for step in inside:
            position = position[step]
        for item in position.get("anyOf", (position,)):
            if item.get("type", "string") == "string":
                item.update(NAME)


def _describe(
    operation: Operation, schemas: dict[int, Any], *, open_to_all: bool
) -> dict[str, Any]:
    text = inspect.getdoc(operation.handler) or ""
    summary, _, description = text.replace("``", "`").partition("\n\n")
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": summary,
        "responses": {
            str(status): _response(
                status,
                NDJSON if operation.media_type == NDJSON else JSON,
                _schema(kind, schemas),
                operation.response_headers if status < HTTPStatus.BAD_REQUEST else (),
            )
            for status, kind in operation.answers.items()
        },
    }
    if description:
        described["description"] = description
    parameters = [_in_path(*result) for result in _IN_PATH.findall(operation.path)]
    parameters += [_parameter("query", item) for item in operation.query]
    parameters += [_parameter("header", header) for header in operation.headers]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content: dict[str, Any] = {"schema": schemas[id(operation.body)]}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {
            "required": True,
            "content": {operation.media_type: content},
        }
    if operation.verbs:
        described["security"] = [{}, {"token": []}] if open_to_all else [{"token": []}]
        described["x-taskqueue-verbs"] = list(operation.verbs)
    for status in _problems(operation):
        fields = _response(status, PROBLEM_TYPE, schemas[id(HttpProblem)], ())
        described["responses"].setdefault(str(status), fields)["content"] |= fields["content"]
    return described


def _response(
    status: int, media_type: str, schema: dict[str, Any], response_headers: tuple[str, ...]
) -> dict[str, Any]:
    names = ["taskqueue-time", *_OF_STATUS.get(status, ()), *response_headers]
    return {
        "description": HTTPStatus(status).phrase,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names},
        "content": {media_type: {"schema": schema}},
    }


def _problems(operation: Operation) -> list[int]:
    matches = {*operation.problems, *_ALWAYS}
    if operation.body is not None:
        matches.update(_NEEDS_BODY)
    if operation.verbs:
        matches.update(_NEEDS_TOKEN)
    return sorted(matches)


def _parameter(where: str, result: Query) -> dict[str, Any]:
    described = {"in": where, **msgspec.structs.asdict(result)}
    if result.example is None:
        del described["example"]
    return described


def _in_path(name: str, converter: str) -> dict[str, Any]:
    names = {
        "key": "the queue's key",
        "id": "the task's id",
        "job_id": "the job's id",
        "name": "the schedule's name",
    }
    text = names.get(name, f"the {name}")
    example = {"key": "emails", "id": "order-4711", "name": "digest"}.get(name, name)
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": text,
        "schema": LABEL if converter else NAME,
        "example": example,
    }
