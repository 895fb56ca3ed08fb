"""The agreed descriptions of the HTTP API and of the worker websocket protocol.

``python -m tests.server.golden`` rewrites the files in ``tests/server/golden``. Any difference is a change that clients
see.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_dispatch.api.extension import OPERATIONS as DISPATCH
from taskqueue_dispatch.api.extension import TAGS
from taskqueue_server.api.table import OPERATIONS
from taskqueue_server.routing import openapi
from taskqueue_server.worker_socket import asyncapi

FOLDER = Path(__file__).with_name("golden")
_VERSION = "0"


def described() -> dict[str, Any]:
    """Return each document by its file name; the HTTP description includes the operations of the dispatcher."""
    documents = {
        "openapi.json": openapi.document([*OPERATIONS, *DISPATCH], _VERSION, tags=TAGS),
        "asyncapi.json": asyncapi.document(_VERSION),
    }
    return {name: json.loads(msgspec.json.encode(found)) for name, found in documents.items()}


if __name__ == "__main__":
    for name, found in described().items():
        (FOLDER / name).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
