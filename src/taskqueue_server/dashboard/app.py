"""The table of the dashboard's pages and actions, which are for people: the description of the API has none of them."""

from __future__ import annotations

from starlette.routing import Route

from taskqueue_server.dashboard import dead_letters as dead
from taskqueue_server.dashboard import login as sessions
from taskqueue_server.dashboard import queues, tasks
from taskqueue_server.dashboard.overview import overview, workers
from taskqueue_server.dashboard.pages import add_templates, as_pages
from taskqueue_server.dashboard.static_files import static
from taskqueue_server.dashboard.stream import live
from taskqueue_server.routing.extensions import Part
from taskqueue_server.routing.operations import Handler, Operation, Scope, routes

__all__ = ["OPERATIONS", "ROUTES", "page_routes"]


def _operation(method: str, path: str, handler: Handler, verb: str | None = "admin") -> Operation:
    scope = Scope.PATH if "{key}" in path else Scope.HANDLER
    return Operation(
        method=method, path=path, handler=handler, verb=verb, scope=scope, answers={200: None}
    )


OPERATIONS = (
    _operation("GET", "/", overview),
    _operation("GET", "/workers", workers),
    _operation("GET", "/live", live),
    _operation("GET", "/find", tasks.find),
    _operation("GET", "/queues/{key}", queues.queue),
    _operation("POST", "/queues/{key}/pause", queues.pause),
    _operation("POST", "/queues/{key}/settings", queues.settings),
    _operation("POST", "/queues/{key}/purge", queues.purge),
    _operation("GET", "/queues/{key}/dead", dead.letters),
    _operation("POST", "/queues/{key}/dead", dead.act),
    _operation("GET", "/tasks/{key}/{id}", tasks.task),
    _operation("POST", "/tasks/{key}/{id}", tasks.act),
    _operation("GET", "/login", sessions.ask, None),
    _operation("POST", "/login", sessions.login, None),
    _operation("POST", "/logout", sessions.logout, None),
    _operation("GET", "/static/{name}", static, None),
)
ROUTES = as_pages(routes(OPERATIONS))


def page_routes(part: Part) -> list[Route]:
    """Return the routes of a part's pages, once their templates are known."""
    if part.templates is not None:
        add_templates(part.templates)
    return as_pages(routes(part.pages))
