"""The descriptions of the HTTP API and of the workers' socket, as they were last agreed on.

``python -m tests.server.golden`` writes the files in ``tests/server/golden``. A difference is a change for clients.
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
    """Return each document by the name of its file; the API's has the operations of the dispatcher too."""
    documents = {
        "openapi.json": openapi.document([*OPERATIONS, *DISPATCH], _VERSION, tags=TAGS),
        "asyncapi.json": asyncapi.document(_VERSION),
    }
    return {name: json.loads(msgspec.json.encode(found)) for name, found in documents.items()}


if __name__ == "__main__":
    for name, found in described().items():
        (FOLDER / name).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
