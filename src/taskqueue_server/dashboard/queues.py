"""The page of one queue: statistics, pause, settings, purge and deletion."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from taskqueue_core.capabilities import Order
from taskqueue_core.errors import (
    CapabilityMissing,
    ConfigurationError,
    InvalidInput,
    QueueInUse,
    SettingsConflict,
)
from taskqueue_core.queue_settings import by_operator, name_change, pause_queue, pause_tenant
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_server.dashboard import formatting, settings_form
from taskqueue_server.dashboard.left_out import left_out, names_of
from taskqueue_server.dashboard.local_metrics import RECENT
from taskqueue_server.dashboard.pages import NOTICES, flows_of, path, poller_of, see_other
from taskqueue_server.dashboard.settings_form import Form, read_form
from taskqueue_server.dashboard.snapshot import StoreReading
from taskqueue_server.dashboard.tenants import READ, pause_everywhere, tenants_of
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

_CONFLICT = (
    "These settings have changed since you opened the form. Your values are shown below, with the current "
    "value next to each one that differs. Save again to overwrite the current values."
)


async def queue(call: RequestContext) -> Response:
    """Show a queue; an unknown queue is empty."""
    return await _page(call, call.name("key"))


async def pause(call: RequestContext) -> Response:
    """Pause or resume deliveries, those of one tenant, or the intake."""
    key, form = call.name("key"), await read_form(call)
    what, paused = form.text("what"), form.text("to") == "paused"
    if form.text("to") not in {"paused", "resumed"}:
        raise InvalidInput("to", "an unknown value", "paused or resumed")
    if what == "tenant":
        return await _pause_tenant(call, key, form, paused=paused)
    intake = what == "intake"
    await pause_queue(call.context.control, key, intake=intake, paused=paused)
    poller_of(call).outdate()
    call.note("pause" if paused else "resume", key, details="intake" if intake else "deliveries")
    notice = ("intake-" if intake else "") + ("paused" if paused else "resumed")
    back = path() if form.text("back") == "overview" else path("queues", key)
    return see_other(back, notice)


async def _pause_tenant(call: RequestContext, key: str, form: Form, *, paused: bool) -> Response:
    """Pause or resume a tenant in a queue, or in all with fair order."""
    tenant, number = form.text("tenant"), None
    try:
        if form.text("everywhere") == "true":
            number = await pause_everywhere(call, tenant, paused=paused)
        else:
            await pause_tenant(call.context.control, key, tenant, paused=paused)
    except InvalidInput as error:
        return await _page(call, key, 422, errors={"tenant": str(error)})
    poller_of(call).outdate()
    verb, notice = ("pause", "tenant-paused") if paused else ("resume", "tenant-resumed")
    if number is not None:
        call.note(f"{verb} tenant", details=f"tenant={tenant} queues={number}")
        if paused and (others := await left_out(call, tenant)):
            said = f"{NOTICES[f'{notice}-everywhere'].format(n=number)} {names_of(others)}"
            return await _page(call, key, said=said)
        return see_other(path("queues", key), f"{notice}-everywhere", number)
    call.note(f"{verb} tenant", key, details=f"tenant={tenant}")
    return see_other(path("queues", key), notice)


async def settings(call: RequestContext) -> Response:
    """Change settings. If a value is invalid, nothing is changed, and the error is shown next to its field."""
    key, form = call.name("key"), await read_form(call)
    found = await call.context.control.settings(key)
    filled = {name: form.text(name) for name in settings_form.NAMES}
    try:
        new = settings_form.changed(found, filled, form.text("version"))
        if new != found:
            await call.context.control.configure(key, by_operator(found, new))
            action, details = name_change(found, new)
            call.note(action, key, details=details)
        return see_other(path("queues", key), "saved")
    except settings_form.FormError as error:
        status, wrong = 422, error.errors
    except InvalidInput as error:
        status, wrong = 422, settings_form.field_errors(error)
    except (CapabilityMissing, ConfigurationError) as error:
        status, wrong = 422, {"": str(error)}
    except SettingsConflict:
        status, wrong = 409, {"": _CONFLICT}
    return await _page(call, key, status, filled=filled, errors=wrong)


async def purge(call: RequestContext) -> Response:
    """Cancel all blocked, waiting and scheduled tasks, if the queue's name was typed as confirmation."""
    key, form = call.name("key"), await read_form(call)
    if form.text("confirm") != key:
        return await _page(
            call, key, 422, errors={"confirm": "Type the name of the queue exactly."}
        )
    number = await call.context.control.purge(key)
    call.note("purge", key, tasks=number)
    return see_other(path("queues", key), "purged", number)


async def delete(call: RequestContext) -> Response:
    """Delete the queue if its name was typed as confirmation, and show the overview."""
    key, form = call.name("key"), await read_form(call)
    if form.text("confirm") != key:
        return await _page(call, key, 422, errors={"delete": "Type the name of the queue exactly."})
    try:
        done = await call.context.control.delete(key)
    except (QueueInUse, InvalidInput) as error:
        return await _page(call, key, 409, errors={"delete": str(error)})
    call.note("delete queue", key)
    poller_of(call).outdate()
    return see_other(path(), "deleted" if done.deleted else "unknown-queue")


async def _page(
    call: RequestContext,
    key: str,
    status: int = 200,
    *,
    filled: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
    said: str | None = None,
) -> Response:
    poller = poller_of(call)
    snapshot = await poller.fresh(key)
    known = key in snapshot.readings
    if snapshot.error is not None and not known:
        detail = f"the store does not respond ({snapshot.error})"
        raise ProblemError(503, "store", detail, headers={"retry-after": "1"})
    reading = snapshot.readings.get(key) or StoreReading(
        QueueStats(key=key, ledger=Ledger()), await call.context.control.settings(key)
    )
    view = DashboardView(call, "queue", key)
    notice: dict[str, Any] = {} if said is None else {"said": said, "focused": True}
    now = settings_form.fields(reading.settings)
    return await view.render(
        snapshot,
        status,
        reading=reading,
        known=known,
        texts={
            **view.texts(snapshot),
            **formatting.of_queue(key, reading, snapshot, poller.history),
        },
        limits=formatting.limits(reading.settings),
        tenants=await tenants_of(call, key, reading, snapshot),
        read=READ,
        recent=RECENT,
        fair=reading.settings.order is Order.FAIR,
        since=flows_of(call).since,
        workers=[worker for worker in view.workers(snapshot) if key in worker.keys],
        groups=settings_form.GROUPS,
        now=now,
        filled=filled or now,
        errors=errors or {},
        **notice,
    )
