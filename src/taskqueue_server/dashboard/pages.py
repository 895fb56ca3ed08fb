"""Rendering of pages, with escaped values and strict security headers, and serving of static files."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import msgspec
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taskqueue_core.application.encoding import readable_error
from taskqueue_server.context.server import VERSION
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.local_metrics import TenantFlows
from taskqueue_server.dashboard.poller import StatsPoller
from taskqueue_server.problems import PROBLEM_TYPE, HttpProblem, ProblemError
from taskqueue_server.routing.operations import RequestContext

_TYPES = {"css": "text/css", "js": "text/javascript"}
_FOLDER = files("taskqueue_server.dashboard") / "static"
FILES = {
    file.name: file.read_bytes()
    for file in sorted(_FOLDER.iterdir(), key=lambda file: file.name)
    if file.name.rpartition(".")[2] in _TYPES
}
"""content of each static file by file name"""
_HASHES = {name: hashlib.sha256(text).hexdigest()[:16] for name, text in FILES.items()}
_FOR_GOOD = "public, max-age=31536000, immutable"


def address(name: str) -> str:
    """Return the URL of a static file. The URL changes if the file's content changes."""
    return f"/static/{name}?v={_HASHES[name]}"


_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # With "no-referrer", browsers would not send the origin of a form, which is needed to detect cross-site requests.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "vary": "cookie",
}
NOTICES: Mapping[str, str] = {
    "paused": "Paused. No tasks are delivered; publishing continues.",
    "resumed": "Resumed. Tasks are delivered again.",
    "intake-paused": "Intake paused. New tasks are refused; existing tasks are delivered.",
    "intake-resumed": "Intake resumed. New tasks are accepted again.",
    "tenant-paused": "Paused. Tasks of this tenant are accepted and wait.",
    "tenant-resumed": "Resumed. Tasks of this tenant are delivered again.",
    "tenant-paused-everywhere": "Paused in all queues with fair order: {n}.",
    "tenant-resumed-everywhere": "Resumed in all queues with fair order: {n}.",
    "saved": "Settings saved.",
    "purged": "Cancelled blocked, waiting and scheduled tasks: {n}.",
    "deleted": "Deleted. The queue and its settings no longer exist.",
    "unknown-queue": "No change: the queue does not exist.",
    "redriven": "Redriven: {n}. The tasks wait at the end of the queue.",
    "discarded": "Discarded permanently: {n}.",
    "cancelled": "Cancelled.",
    "all-cancelled": "Cancelled: {n}.",
    "erased": "Erased: {n}.",
    "erased-some": "Erased: {n}. More tasks have the tag: repeat the action to continue.",
    "due-now": "Available now: {n}.",
    "unchanged": "No change: the tasks have changed their state in the meantime.",
    "not-live": "No change: the task has already ended.",
    "not-dead": "No change: the task is no longer a dead letter.",
    "nothing": "No change: no task was selected, or the selected tasks are no longer dead letters.",
    "more": "Done: {n}. More dead letters match: repeat the action to continue.",
    "workflow-cancelled": "The workflow is cancelled; its steps end in a moment.",
    "schedule-paused": "Paused. The schedule publishes no tasks until it is resumed.",
    "schedule-resumed": "Resumed. The schedule continues with its next instant.",
    "schedule-run": "Published: the task waits in its queue.",
    "schedule-overlap": "No change: an earlier task of this schedule has not ended.",
    "signed-out": "Signed out.",
}
"""messages shown after an action; the URL contains only a name and a number, so that a link cannot inject text"""
_DEFAULTS = {
    "said": None,
    "focused": False,
    "open": False,
    "who": None,
    "live": None,
    "shape": None,
    "query": "",
}
"""default values of the variables of ``base.html``"""
_DIGITS = 12
_TURN_SECONDS = 0.004
"""maximum number of seconds of rendering before other tasks of the event loop get a turn"""
_LOCAL_PATH = re.compile(r"/(?!/)[ -\[\]-~]{0,1999}")
"""a path without a host: printable ASCII without backslashes, which browsers treat as slashes"""
_problem = msgspec.json.Decoder(HttpProblem)
_loader = ChoiceLoader([PackageLoader("taskqueue_server.dashboard")])
_environment = Environment(
    loader=_loader,
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


def path(*parts: str) -> str:
    """Return the path of a page, with each part quoted."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


_environment.filters.update(
    count=formatting.count,
    duration=formatting.duration,
    clock=formatting.clock,
    rate=formatting.rate,
    rate_limit=formatting.rate_limit,
    readable=partial(readable_error, None),
)
_environment.globals.update(static=address, path=path, version=VERSION, parts=formatting.PARTS)
# Load all templates at import, so that an upgrade of the package cannot mix new templates with old, running code.
for _name in _environment.list_templates(extensions=["html"]):
    _environment.get_template(_name)


def add_templates(package: str) -> None:
    """Add a package's templates, which may extend ``base.html``. Idempotent."""
    known = {loader.package_name for loader in _loader.loaders if isinstance(loader, PackageLoader)}
    if package not in known:
        added = PackageLoader(package)
        _loader.loaders = [*_loader.loaders, added]
        for name in added.list_templates():
            _environment.get_template(name)


def poller_of(call: RequestContext) -> StatsPoller:
    """Return the poller of the server that handles the request."""
    return StatsPoller.of(call.context)


def flows_of(call: RequestContext) -> TenantFlows:
    """Return the counts of tenants of the server that handles the request."""
    flows: TenantFlows = call.request.app.state.tenants
    return flows


async def render(call: RequestContext, template: str, status: int = 200, **names: Any) -> Response:
    """Return the page rendered from a template with the variables ``names``."""
    request = call.request
    notice, number = request.query_params.get("said", ""), request.query_params.get("n", "")
    digits = number if number.isdecimal() and len(number) <= _DIGITS else "?"
    names = {
        **_DEFAULTS,
        "said": NOTICES[notice].format(n=digits) if notice in NOTICES else None,
        "open": not call.context.access.authenticates,
        "who": call.identity.name if call.identity else None,
        "operates": call.identity is not None and "admin" in call.identity.verbs,
        "here": request.url.path,
        "links": request.app.state.links,
        **names,
    }
    pieces, text = _environment.get_template(template).generate(names), list[str]()
    turn, more = poller_of(call).turn, True
    while more:
        async with turn:
            until, more = time.perf_counter() + _TURN_SECONDS, False
            for piece in pieces:
                text.append(piece)
                if time.perf_counter() > until:
                    more = True
                    break
            await asyncio.sleep(0)  # let other pages render, and other asyncio tasks run
    return _response("".join(text), status)


def _response(text: str, status: int) -> Response:
    return Response(
        text.encode("utf-8", "replace"), status, _HEADERS, media_type="text/html; charset=utf-8"
    )


def see_other(target: str, notice: str | None = None, number: int | None = None) -> Response:
    """Return a redirect to the page ``target``, which shows ``notice``. Reloading it does not repeat the action."""
    if notice is not None:
        target += f"{'&' if '?' in target else '?'}said={notice}"
        target += "" if number is None else f"&n={number}"
    return Response(status_code=303, headers={"location": target})


def local_path(text: str | None) -> str:
    """Return ``text`` if it is a path on this server, otherwise ``/``."""
    return text if text is not None and _LOCAL_PATH.fullmatch(text) else "/"


def as_pages(routes: list[Route]) -> list[Route]:
    """Return routes that show problems as pages, and redirect unauthenticated clients to the sign-in page."""
    return [Route(route.path, _as_page(route.endpoint), methods=route.methods) for route in routes]


def _as_page(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def handler_as_page(request: Request) -> Response:
        response = await endpoint(request)
        if response.media_type != PROBLEM_TYPE or "text/event-stream" in request.headers.get(
            "accept", ""
        ):
            return response
        problem = _problem.decode(response.body)
        if problem.status == HTTPStatus.UNAUTHORIZED:
            return _to_login(request)
        text = _environment.get_template("problem.html").render(
            **_DEFAULTS, problem=problem, here=request.url.path
        )
        page = _response(text, problem.status)
        if "retry-after" in response.headers:
            page.headers["retry-after"] = response.headers["retry-after"]
        return page

    return handler_as_page


def _to_login(request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    requested = request.url.path + query if request.method == "GET" else "/"
    target = (
        "/login" if requested == "/" else f"/login?next={quote(local_path(requested), safe='')}"
    )
    # htmx would insert the page that a 303 names into the current page; HX-Redirect makes the browser open it instead.
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"hx-redirect": target})
    return Response(status_code=303, headers={"location": target})


async def static(call: RequestContext) -> Response:
    """Return a static file. If the URL has the hash of the file's content, the file may be cached forever."""
    name = call.request.path_params["name"]
    if name not in FILES:
        raise ProblemError(404, "not_found", "no resource at this path")
    tag = f'"{_HASHES[name]}"'
    versioned = call.request.query_params.get("v") == _HASHES[name]
    headers = {"etag": tag, "cache-control": _FOR_GOOD if versioned else "no-cache"}
    if tag in call.request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(FILES[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
