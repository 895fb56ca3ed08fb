"""Sign in and sign out."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.auth.credentials import login_cookie, logout_cookie, secret_of
from taskqueue_server.dashboard.pages import local_path, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.routing.operations import RequestContext, require_own_page

_TOKEN = 4096
_FORM_BYTES = 8 * 1024
_FORM_FIELDS = 8


async def ask(call: RequestContext) -> Response:
    """Show the sign-in form; on a server without authentication, redirect to the requested page."""
    target = local_path(call.request.query_params.get("next"))
    if not call.context.access.authenticates:
        return see_other(target)
    return await render(call, "login.html", target=target, error=None)


async def login(call: RequestContext) -> Response:
    """Start a session with a token that has the right ``observe`` or ``admin``."""
    _require_own_page(call)
    form = await read_form(call, _FORM_BYTES, _FORM_FIELDS)
    target, token = local_path(form.text("next")), form.text("token")
    if not call.context.access.authenticates:
        return see_other(target)
    identity = (
        call.context.access.authenticate(call.request, token) if 0 < len(token) <= _TOKEN else None
    )
    if identity is None:
        message = "Unknown token. Check that you copied it completely and that it has not expired or been revoked."
        return await render(call, "login.html", 401, target=target, error=message)
    if identity.verbs.isdisjoint(OBSERVING):
        message = "This token is valid, but the dashboard requires a token with the right observe or admin."
        return await render(call, "login.html", 403, target=target, error=message)
    sessions = call.context.access.sessions
    await sessions.end(secret_of(call.request))
    secret = await sessions.start(token)
    response = see_other(target)
    response.headers["set-cookie"] = login_cookie(
        call.request, secret, call.context.settings.origins
    )
    return response


async def logout(call: RequestContext) -> Response:
    """End the session of this browser, on all servers."""
    _require_own_page(call)
    await call.context.access.sessions.end(secret_of(call.request))
    response = see_other("/login", "signed-out")
    response.headers["set-cookie"] = logout_cookie(call.request)
    return response


def _require_own_page(call: RequestContext) -> None:
    # A page of another site must not sign a user in or out, even if its origin may use the API.
    if "origin" in call.request.headers:
        require_own_page(call)
