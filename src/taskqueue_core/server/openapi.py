"""The OpenAPI 3.1 document, made from the table of operations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel

from taskqueue_core.server.bodies import JSON, NDJSON
from taskqueue_core.server.operations import Operation
from taskqueue_core.server.problems import PROBLEM_TYPE, Problem

__all__ = ["document"]

_REF = "#/components/schemas/{name}"
_PYDANTIC_REF = "#/components/schemas/{model}"
_NEEDS_BODY = (400, 408, 413, 415)
_NEEDS_TOKEN = (401, 403)
_ALWAYS = (422, 500)
_NOT_NOW = (429, 503)


def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """Describe every operation, its bodies and its problems."""
    kinds = [Problem, *(kind for operation in operations for kind in _kinds(operation))]
    schemas, components = _schemas(kinds)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _describe(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "taskqueue",
            "version": version,
            "description": "Publish tasks and operate queues. Workers use the socket protocol instead.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "headers": {
                "taskqueue-time": {
                    "description": "the store's time, Unix seconds",
                    "schema": {"type": "number"},
                },
                "retry-after": {
                    "description": "after how many seconds it may go better",
                    "schema": {"type": "integer"},
                },
            },
        },
    }


def _kinds(operation: Operation) -> list[Any]:
    kinds: list[Any] = []
    for kind in (operation.body, *operation.answers.values()):
        kinds += kind if isinstance(kind, tuple) else [kind]
    return [kind for kind in kinds if kind is not None]


def _schema(kind: Any, schemas: dict[int, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, tuple):
        return {"anyOf": [schemas[id(one)] for one in kind]}
    found: dict[str, Any] = schemas[id(kind)]
    return found


def _schemas(kinds: Sequence[Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the schema of each kind by its id, and the components they refer to."""
    ours = [kind for kind in kinds if not _is_pydantic(kind)]
    described, components = msgspec.json.schema_components(ours, ref_template=_REF)
    schemas = {id(kind): schema for kind, schema in zip(ours, described, strict=True)}
    for kind in kinds:
        if _is_pydantic(kind):
            schema = kind.model_json_schema(ref_template=_PYDANTIC_REF)
            components.update(schema.pop("$defs", {}))
            components[kind.__name__] = schema
            schemas[id(kind)] = {"$ref": _REF.format(name=kind.__name__)}
    return schemas, components


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _describe(operation: Operation, schemas: dict[int, Any]) -> dict[str, Any]:
    text = inspect.getdoc(operation.handler) or ""
    summary, _, description = text.partition("\n\n")
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": summary,
        "responses": {
            str(status): _response(status, _answer_type(operation), _schema(kind, schemas))
            for status, kind in operation.answers.items()
        },
    }
    if description:
        described["description"] = description
    parameters = [_in_path(name) for name in re.findall(r"{(\w+)}", operation.path)]
    parameters += [{"in": "query", **msgspec.structs.asdict(query)} for query in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = schemas[id(operation.body)]
        content = {operation.media_type: {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.verb is not None:
        described["security"] = [{}, {"token": []}]
    for status in _problems(operation):
        told = _response(status, PROBLEM_TYPE, schemas[id(Problem)])
        described["responses"].setdefault(str(status), told)["content"] |= told["content"]
    return described


def _response(status: int, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    names = ["taskqueue-time", *(["retry-after"] if status in _NOT_NOW else [])]
    return {
        "description": HTTPStatus(status).phrase,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names},
        "content": {media_type: {"schema": schema}},
    }


def _problems(operation: Operation) -> list[int]:
    found = {*operation.problems, *_ALWAYS}
    if operation.body is not None:
        found.update(_NEEDS_BODY)
    if operation.verb is not None:
        found.update(_NEEDS_TOKEN)
    return sorted(found)


def _operation_id(operation: Operation) -> str:
    module = operation.handler.__module__.rpartition(".http_")[2]
    return f"{module}_{operation.handler.__name__}"


def _answer_type(operation: Operation) -> str:
    return NDJSON if operation.media_type == NDJSON else JSON


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
