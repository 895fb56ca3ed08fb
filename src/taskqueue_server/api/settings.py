"""The settings of a queue: read, replace, reset, pause and resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.responses import Response

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput, SettingsConflict
from taskqueue_core.hooks import is_internal
from taskqueue_core.limits import kind_of
from taskqueue_core.queue_settings import (
    by_operator,
    change_settings,
    merge_settings,
    name_change,
    pause_queue,
    pause_tenant,
    read_settings,
    reset_settings,
)
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import Operation, Query, RequestContext
from taskqueue_server.routing.schemas import NAME

_VERSIONS = 999_999_999
_MERGE_PATCH = "application/merge-patch+json"
_ETAG = re.compile(r'"([0-9]{1,9})"')


async def read(call: RequestContext) -> Response:
    """Return the queue's current settings."""
    return _answer(await call.context.control.settings(call.name("key")))


async def replace(call: RequestContext) -> Response:
    """Replace the queue's settings. They take effect with the next operation on the queue.

    The current version is required: as ``version`` in the body, or as its ``ETag`` in the header ``If-Match``, which
    takes precedence. If another version is current, the response is 409, or 412 with ``If-Match``. To bind
    the queue to another queue, the token must permit that queue too. An operator owns the fields that are changed.
    """
    key = call.name("key")
    body = await call.read()
    bodies.decode(object, body)  # raises the usual error if the body is not valid JSON
    settings, version = read_settings(body), _if_match(call)
    if version is not None:
        settings = settings.model_copy(update={"version": version})
    found = await call.context.control.settings(key)
    # With another version, the targets of the current settings do not count; `configure` refuses such a change.
    bound = found.bound_to if found.version == settings.version else ()
    _demand_targets(call, set(settings.bound_to) - set(bound))
    if not call.flag("owners_as_sent"):
        if "owners" not in settings.model_fields_set:
            settings = settings.model_copy(update={"owners": found.owners})
        settings = by_operator(found, settings)
    with _precondition(version):
        stored = await call.context.control.configure(key, settings)
    action, details = name_change(found, stored)
    call.note(action, key, details=details)
    return _answer(stored)


async def patch(call: RequestContext) -> Response:
    """Change some of the queue's settings, as a JSON merge patch (RFC 7396): null resets a setting to its default.

    The settings that the patch omits are kept. A version is optional: as ``version`` in the body, or as its ``ETag``
    in the header ``If-Match``, which takes precedence. With a version, the response is 409, or 412 with ``If-Match``,
    if another version is current; without it, the patch is applied to the current version. To bind the queue to
    another queue, the token must permit that queue too. An operator owns the fields that are changed.
    """
    key = call.name("key")
    sent = call.request.headers.get("content-type", "").lower()
    kind = _MERGE_PATCH if sent.startswith(_MERGE_PATCH) else bodies.JSON
    body = bodies.decode(dict[str, Any], await call.read(kind))
    asked, matched = body.pop("version", None), _if_match(call)
    if asked is not None and (type(asked) is not int or not 0 <= asked <= _VERSIONS):
        raise InvalidInput("version", kind_of(asked), f"a whole number from 0 to {_VERSIONS}")
    version = asked if matched is None else matched

    action = details = ""

    def edit(current: QueueSettings) -> QueueSettings:
        nonlocal action, details
        wanted = merge_settings(current, body)
        _demand_targets(call, set(wanted.bound_to) - set(current.bound_to))
        action, details = name_change(current, wanted)
        return by_operator(current, wanted)

    with _precondition(matched):
        stored = await change_settings(call.context.control, key, edit, version=version)
    call.note(action, key, details=details)
    return _answer(stored)


def _demand_targets(call: RequestContext, targets: set[str]) -> None:
    """Raise `ProblemError` if the client may not administer one of the queues, or if one of them is internal."""
    for target in targets:
        if is_internal(target) or not call.is_allowed(target):
            call.demand(target)
            raise InvalidInput("bound_to", "an internal queue of the server", "other queues")


async def reset(call: RequestContext) -> Response:
    """Reset the queue's settings to the defaults, which take effect with the next operation on the queue.

    The current version is required: as ``version`` in the query, or as its ``ETag`` in the header ``If-Match``.
    """
    key, matched = call.name("key"), _if_match(call)
    if matched is None:
        version = call.number("version", None, _VERSIONS, lowest=0)
    elif "version" in call.request.query_params:
        raise InvalidInput("version", "both a version and If-Match", "only one of them")
    else:
        version = matched
    with _precondition(matched):
        stored = await reset_settings(call.context.control, key, version=version)
    call.note("reset settings", key)
    return _answer(stored)


def _if_match(call: RequestContext) -> int | None:
    """Return the version in the header ``If-Match``, or ``None`` without this header. Raises `InvalidInput`."""
    values = call.request.headers.getlist("if-match")
    if not values:
        return None
    if len(values) > 1 or not (match := _ETAG.fullmatch(values[0])):
        raise InvalidInput(
            "If-Match", f"invalid text of length {len(values[0])}", 'one ETag, such as "3"'
        )
    return int(match[1])


@contextmanager
def _precondition(matched: int | None) -> Iterator[None]:
    """Turn a `SettingsConflict` into the status 412 if ``matched``, the version in ``If-Match``, is not ``None``."""
    try:
        yield
    except SettingsConflict as error:
        if matched is None:
            raise
        raise ProblemError(412, error.code, str(error)) from None


async def pause(call: RequestContext) -> Response:
    """Pause deliveries: of the queue, or of one ``tenant`` only. With ``intake``, pause its intake instead. Idempotent.

    A tenant can be paused in a queue with fair order. Its tasks are accepted and wait; running tasks are not affected.
    The other settings are kept, even if they are changed at the same moment.
    """
    return await _pause(call, paused=True)


async def resume(call: RequestContext) -> Response:
    """Resume deliveries: of the queue, or of one ``tenant`` only. With ``intake``, resume its intake. Idempotent."""
    return await _pause(call, paused=False)


async def _pause(call: RequestContext, *, paused: bool) -> Response:
    key, intake, tenant = call.name("key"), call.flag("intake"), call.query_name("tenant")
    control, action = call.context.control, "pause" if paused else "resume"
    details = "intake" if intake else "deliveries"
    if tenant is None:
        stored = await pause_queue(control, key, intake=intake, paused=paused)
    elif intake:
        raise InvalidInput("tenant", "a tenant together with intake", "only one of them")
    else:
        stored = await pause_tenant(control, key, tenant, paused=paused)
        action, details = f"{action} tenant", f"tenant={tenant}"
    call.note(action, key, details=details)
    return _answer(stored)


def _answer(settings: QueueSettings) -> Response:
    headers = {"etag": f'"{settings.version}"'}
    return Response(settings.model_dump_json(), headers=headers, media_type=bodies.JSON)


_KEY = "/v1/queues/{key}"
_INTAKE_PAUSED = Query(
    "intake",
    {"type": "boolean", "default": False},
    "pause or resume the acceptance of new tasks instead of deliveries",
)
_TENANT = Query(
    "tenant",
    NAME,
    "pause or resume the deliveries of this tenant only, in a queue with fair order",
)
_VERSION = Query(
    "version",
    {"type": "integer", "minimum": 0, "maximum": _VERSIONS},
    "the current version of the settings; required without `If-Match`",
    example=3,
)
_OWNERS = Query(
    "owners_as_sent",
    {"type": "boolean", "default": False},
    "store `owners` of the body as it is; otherwise an operator owns the fields that are changed",
)
_IF_MATCH = Query(
    "If-Match",
    {"type": "string", "pattern": f"^{_ETAG.pattern}$"},
    "the `ETag` of the current version of the settings",
    example='"3"',
)
_operation = partial(
    Operation, answers={200: QueueSettings}, response_headers=("ETag",), tag="queues", verb="admin"
)
OPERATIONS = (
    _operation(
        "GET",
        f"{_KEY}/settings",
        read,
        id="settings_read",
        verb=(*OBSERVING, "consume"),
    ),
    _operation(
        "PUT",
        f"{_KEY}/settings",
        replace,
        id="settings_replace",
        body=QueueSettings,
        query=(_OWNERS,),
        headers=(_IF_MATCH,),
        problems=(409, 412),
        example={"version": 3, "max_inflight": 10},
    ),
    _operation(
        "PATCH",
        f"{_KEY}/settings",
        patch,
        id="settings_patch",
        body=QueueSettings,
        headers=(_IF_MATCH,),
        problems=(409, 412),
        example={"max_inflight": 10, "rate_limit": None},
    ),
    _operation(
        "DELETE",
        f"{_KEY}/settings",
        reset,
        id="settings_reset",
        query=(_VERSION,),
        headers=(_IF_MATCH,),
        problems=(409, 412),
    ),
    *(
        _operation(
            "POST",
            f"{_KEY}/{name}",
            handler,
            id=f"settings_{name}",
            query=(_INTAKE_PAUSED, _TENANT),
            problems=(409,),
        )
        for name, handler in (("pause", pause), ("resume", resume))
    ),
)
