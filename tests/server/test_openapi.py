"""The description of the API is complete and true."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from taskqueue_core.server.api.table import OPERATIONS
from taskqueue_memory import MemoryBackend
from tests.server.support import problem
from tests.server.test_http_operations import bury

_NAMES = {"key": "k", "id": "a"}


def refs(node: Any) -> set[str]:
    """All references in a document."""
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(refs, node.values()))
    return set().union(*map(refs, node)) if isinstance(node, list) else set()


def fits(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether a value fits, as far as types, required and known properties go."""
    if "$ref" in schema:
        return fits(
            value, document["components"]["schemas"][schema["$ref"].split("/")[-1]], document
        )
    if "anyOf" in schema:
        return any(fits(value, one, document) for one in schema["anyOf"])
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    kind: Any = kinds[schema["type"]] if "type" in schema else object
    good = isinstance(value, kind) and value in schema.get("enum", [value])
    if isinstance(value, list):
        good &= all(fits(one, schema.get("items", {}), document) for one in value)
    if isinstance(value, dict) and "properties" in schema:
        good &= set(schema.get("required", ())) <= set(value) <= set(schema["properties"])
        good = good and all(
            fits(value[name], schema["properties"][name], document) for name in value
        )
    return good


async def test_it_is_whole(api: httpx2.AsyncClient) -> None:
    """Every operation is there, once, with a summary, and every reference leads somewhere."""
    document = (await api.get("/v1/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == {(operation.method, operation.path) for operation in OPERATIONS}
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"].endswith(".") for one in operations)
    for ref in refs(document):
        node = document
        for step in ref.removeprefix("#/").split("/"):
            node = node[step]
    for path, methods in document["paths"].items():
        for one in methods.values():
            named = {p["name"] for p in one.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
async def test_it_is_true(api: httpx2.AsyncClient, backend: MemoryBackend, operation: Any) -> None:
    """Each operation answers with a status and a body that are described, to a proper request and to nonsense."""
    document = (await api.get("/v1/openapi.json")).json()
    described = document["paths"][operation.path][operation.method.lower()]
    await bury(backend, "a", "b")
    bodies: dict[str, Any] = {
        "/v1/tasks": {"key": "k", "id": "c"},
        "/v1/tasks/batch": {"key": "k", "id": "c"},
        "/v1/retries": {"task": {"key": "k", "id": "c"}, "delay": 1},
        "/v1/queues/{key}/settings": {},
    }
    lists = {"ids": ["a"]}
    url = operation.path.format(**_NAMES)
    needed = {"/v1/queues/{key}/purge": "confirm=k", "/v1/queues/{key}/settings": "version=0"}
    if operation.path in needed and operation.query:
        name = needed[operation.path].partition("=")[0]
        problem(await api.request(operation.method, url), 422, "invalid_input", name)
        url += f"?{needed[operation.path]}"
    for body in (bodies.get(operation.path, lists), {"nonsense": 1}):
        if operation.body is None:
            answer = await api.request(operation.method, url)
        else:
            headers = {"content-type": operation.media_type}
            answer = await api.request(operation.method, url, json=body, headers=headers)
        told = described["responses"][str(answer.status_code)]
        kind = answer.headers["content-type"]
        assert "taskqueue-time" in answer.headers
        for line in answer.text.splitlines():
            value = httpx2.Response(200, text=line).json()
            assert fits(value, told["content"][kind]["schema"], document), line
