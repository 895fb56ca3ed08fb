"""Operations of the dashboard, and the handlers of two pages: the overview and the list of workers."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.dashboard import (
    audit,
    dead_everywhere,
    dead_letters,
    login,
    queues,
    schedules,
    task_lists,
    tasks,
    worker,
    workflows,
)
from taskqueue_server.dashboard.pages import add_templates, as_pages, poller_of, static
from taskqueue_server.dashboard.stream import live
from taskqueue_server.dashboard.views import DashboardView, sees_all
from taskqueue_server.routing.extensions import Extension
from taskqueue_server.routing.operations import Handler, Operation, RequestContext, Scope, routes


async def overview(call: RequestContext) -> Response:
    """Show the queues that the client may see, their ledger, charts and the number of workers."""
    view = DashboardView(call, "overview")
    snapshot = await view.showing(await poller_of(call).fresh())
    chosen, keys = view.chosen, view.keys(snapshot)
    found = chosen.found(snapshot, keys)
    return await view.render(
        snapshot,
        200 if snapshot.error is None else 503,
        readings={key: snapshot.readings[key] for key in chosen.shown(found)},
        number=len(keys),
        found=len(found),
        chosen=chosen._replace(page=min(chosen.page, chosen.pages(found))),
        pages=chosen.pages(found),
        everything=sees_all(call),
    )


async def workers(call: RequestContext) -> Response:
    """Show the workers that subscribe only to queues that the client may see, on all servers of the same store."""
    return await DashboardView(call, "workers").render(await poller_of(call).fresh())


def _operation(method: str, path: str, handler: Handler, *, public: bool = False) -> Operation:
    verb = None if public else OBSERVING if method == "GET" else "admin"
    scope = Scope.PATH if "{key}" in path else Scope.HANDLER
    return Operation(
        method=method, path=path, handler=handler, verb=verb, scope=scope, answers={200: None}
    )


OPERATIONS = (
    _operation("GET", "/", overview),
    _operation("GET", "/workers", workers),
    _operation("GET", "/workers/{name}", worker.worker),
    _operation("GET", "/schedules", schedules.schedules),
    _operation("GET", "/schedules/{name}", schedules.schedule),
    _operation("POST", "/schedules/{name}", schedules.act),
    _operation("GET", "/workflows", workflows.workflows),
    _operation("GET", "/workflows/{id}", workflows.workflow),
    _operation("POST", "/workflows/{id}", workflows.act),
    _operation("GET", "/audit", audit.audit),
    _operation("GET", "/dead", dead_everywhere.dead_everywhere),
    _operation("POST", "/dead", dead_everywhere.act),
    _operation("GET", "/live", live),
    _operation("GET", "/find", tasks.find),
    _operation("GET", "/queues/{key}", queues.queue),
    _operation("POST", "/queues/{key}/pause", queues.pause),
    _operation("POST", "/queues/{key}/settings", queues.settings),
    _operation("POST", "/queues/{key}/purge", queues.purge),
    _operation("POST", "/queues/{key}/delete", queues.delete),
    _operation("GET", "/queues/{key}/dead", dead_letters.dead_letters),
    _operation("POST", "/queues/{key}/dead", dead_letters.act),
    _operation("GET", "/queues/{key}/tasks", task_lists.tasks),
    _operation("POST", "/queues/{key}/tasks", task_lists.act),
    _operation("GET", "/tasks/{key}/{id}", tasks.task),
    _operation("POST", "/tasks/{key}/{id}", tasks.act),
    _operation("GET", "/login", login.ask, public=True),
    _operation("POST", "/login", login.login, public=True),
    _operation("POST", "/logout", login.logout, public=True),
    _operation("GET", "/static/{name}", static, public=True),
)
ROUTES = as_pages(routes(OPERATIONS))


def page_routes(part: Extension) -> list[Route]:
    """Return the routes of an extension's pages, and register its templates."""
    if part.templates is not None:
        add_templates(part.templates)
    return as_pages(routes(part.pages))
