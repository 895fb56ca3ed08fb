"""The OpenAPI document describes the HTTP API completely and correctly."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx2
import jsonschema_rs
import msgspec
import pytest

from taskqueue_memory import MemoryBackend
from taskqueue_server.api.table import OPERATIONS
from taskqueue_server.context.server import VERSION
from taskqueue_server.routing.openapi import document
from tests.server.support import problem
from tests.server.test_http_operations import bury

DOCUMENT: dict[str, Any] = json.loads(
    msgspec.json.encode(document(OPERATIONS, VERSION, open_to_all=True))
)
BODIES: dict[str, Any] = {
    "/v1/tasks": {"key": "k", "id": "c"},
    "/v1/tasks/batch": {"key": "k", "id": "c"},
    "/v1/retries": {"task": {"key": "k", "id": "c"}, "delay": 1},
    "/v1/queues/{key}/settings": {},
    "/v1/schedules/{name}": {
        "schedule": {"when": {"type": "every", "seconds": 60}, "call": {"key": "k"}}
    },
    "/v1/schedules/{name}/run": {},
}
ODD_NAMES = ["a%20b", "x" * 201, "%00", "-a", "{k}"]
ODD_TEXTS = ["", "x", "-1", "1.5", "9" * 30, "%ff"]
ODD_VALUES = [None, True, -1, 0.5, 2**63, 1e300, "", "\0", "x" * 201, [], ["a b"], {"a": 1}]
_NAMES = {"key": "k", "id": "a", "name": "s"}


def refs(node: Any) -> set[str]:
    """Return all references in a part of the document."""
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(refs, node.values()))
    return set().union(*map(refs, node)) if isinstance(node, list) else set()


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of the schema to which a reference points."""
    name = schema["$ref"].rpartition("/")[2]
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]["properties"]
    return found


@cache
def answered(method: str, path: str, status: int, kind: str) -> Any:
    """Return the validator of the response with this status and media type."""
    described = DOCUMENT["paths"][path][method.lower()]
    schema = described["responses"][str(status)]["content"][kind]["schema"]
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})


def check(answer: httpx2.Response, operation: Any) -> None:
    """Check that the status, the media type and each line of a response agree with the document."""
    assert answer.status_code < 500, answer.text
    kind = answer.headers["content-type"]
    fits = answered(operation.method, operation.path, answer.status_code, kind)
    for line in answer.text.splitlines():
        fits.validate(json.loads(line))
    assert "taskqueue-time" in answer.headers


def test_it_is_whole() -> None:
    """The document contains each operation once, with a summary, and all its references resolve."""
    assert DOCUMENT["openapi"] == "3.1.0"
    described = {
        (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    assert described == {(operation.method, operation.path) for operation in OPERATIONS}
    operations = [one for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"].endswith(".") for one in operations)
    for ref in refs(DOCUMENT):
        node = DOCUMENT
        for step in ref.removeprefix("#/").split("/"):
            node = node[step]
    for path, methods in DOCUMENT["paths"].items():
        for one in methods.values():
            named = {p["name"] for p in one.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


async def ask(api: httpx2.AsyncClient, operation: Any, url: str, body: Any) -> httpx2.Response:
    """Call an operation, with the body if it accepts one."""
    headers = {"content-type": operation.media_type} if operation.body else {}
    content = json.dumps(body) if operation.body else None
    return await api.request(operation.method, url, content=content, headers=headers)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
async def test_it_is_true(api: httpx2.AsyncClient, backend: MemoryBackend, operation: Any) -> None:
    """Faults K2 to K4: responses to valid requests and to odd values in each place agree with the document."""
    await bury(backend, "a", "b")
    await api.put("/v1/schedules/s", json=BODIES["/v1/schedules/{name}"])
    proper = BODIES.get(operation.path, {"ids": ["a"]})
    plain = url = operation.path.format(**_NAMES)
    needed = {"/v1/queues/{key}/purge": "confirm=k", "/v1/queues/{key}/tasks": "state=dead"}
    if operation.method == "DELETE":
        needed |= {"/v1/queues/{key}": "confirm=k", "/v1/queues/{key}/settings": "version=0"}
    if operation.path in needed and operation.query:
        name = needed[operation.path].partition("=")[0]
        problem(await ask(api, operation, url, proper), 422, "invalid_input", name)
        url += f"?{needed[operation.path]}"
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]
    urls = [operation.path.format(**_NAMES | {name: odd}) for name in _NAMES for odd in ODD_NAMES]
    for parameter in described.get("parameters", ()):
        if parameter["in"] == "query":
            urls += [f"{plain}?{parameter['name']}={odd}" for odd in ODD_TEXTS]
    bodies = [proper, {"nonsense": 1}, [], None]
    if operation.body:
        (content,) = described["requestBody"]["content"].values()
        bodies += [
            {**proper, name: odd} for name in resolve(content["schema"]) for odd in ODD_VALUES
        ]
    for where in dict.fromkeys(urls):
        check(await ask(api, operation, where, proper), operation)
    for body in bodies if operation.body else (None, None):
        check(await ask(api, operation, url, body), operation)


async def test_the_served_description(api: httpx2.AsyncClient) -> None:
    """The server serves the same document that these tests check."""
    assert (await api.get("/v1/openapi.json")).json() == DOCUMENT
