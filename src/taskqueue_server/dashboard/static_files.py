"""The files that pages need, each under an address that changes with its content."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.responses import Response

from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

_TYPES = {"css": "text/css", "js": "text/javascript"}
_FOLDER = files("taskqueue_server.dashboard") / "static"
FILES = {
    file.name: file.read_bytes()
    for file in sorted(_FOLDER.iterdir(), key=lambda file: file.name)
    if file.name.rpartition(".")[2] in _TYPES
}
"""by name; they are small and few"""
_HASHES = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in FILES.items()}
_FOR_GOOD = "public, max-age=31536000, immutable"


def address(name: str) -> str:
    """Return where a file is."""
    return f"/static/{name}?v={_HASHES[name]}"


async def static(call: RequestContext) -> Response:
    """Return a file. Under the address that names its content it may be kept for good."""
    name = call.request.path_params["name"]
    if name not in FILES:
        raise ProblemError(404, "not_found", "nothing found at this path")
    tag = f'"{_HASHES[name]}"'
    named = call.request.query_params.get("v") == _HASHES[name]
    headers = {"etag": tag, "cache-control": _FOR_GOOD if named else "no-cache"}
    if tag in call.request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(FILES[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
