"""The texts that the event stream updates on the dispatcher's dashboard page, by name."""

from __future__ import annotations

import hashlib

from taskqueue_core.capabilities import EndpointInfo, QueueSettings
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_dispatch.dashboard.snapshot import ModelSnapshot, PoolSnapshot
from taskqueue_dispatch.registry import endpoint_state
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.snapshot import Snapshot, StoreReading

_JOBS_RELOAD = 3
"""number of snapshots after which the page reloads its list of running jobs"""
_MAX_MARKS = 24
"""maximum number of slots of an endpoint for which the page draws one mark per slot"""


def texts(snapshot: PoolSnapshot, sample: Snapshot) -> dict[str, str]:
    """Return all texts of the page by name.

    The value of a name that begins with ``@`` is the name of a state, which selects a colour.
    """
    values = _store(snapshot, sample)
    for model in snapshot.models:
        values.update(_of_model(model, snapshot.at))
    for info in snapshot.endpoints:
        values.update(_of_endpoint(info, snapshot.at))
    for lease in snapshot.jobs:
        status = snapshot.statuses.get(lease.job or "")
        values[f"j.{lease.job}.age"] = formatting.age(
            status.updated_at if status else None, snapshot.at
        )
        values[f"j.{lease.job}.state"] = lease.state.value
    running = sum(info.assigned + info.detached for info in snapshot.view.endpoints)
    values["running"] = formatting.count(running)
    return values


def shape(snapshot: PoolSnapshot) -> str:
    """Return a digest of the page's structure. If the digest changes, the whole page must be reloaded."""
    parts = [
        snapshot.error,
        [model.model for model in snapshot.models],
        [(info.endpoint, info.draining, info.removed) for info in snapshot.endpoints],
        snapshot.number // _JOBS_RELOAD if snapshot.jobs else None,
    ]
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:12]


def _store(snapshot: PoolSnapshot, sample: Snapshot) -> dict[str, str]:
    error = snapshot.error or sample.error
    if error is not None:
        return {"store": f"does not respond ({error})", "@store": "bad"}
    if sample.health.ok:
        return {"store": "responds", "@store": "ok"}
    return {"store": "is not healthy", "@store": "bad"}


def _of_model(model: ModelSnapshot, now: float) -> dict[str, str]:
    reading = model.reading or StoreReading(
        QueueStats(key=model.key, ledger=Ledger()), QueueSettings()
    )
    ledger, stats = reading.ledger, reading.stats
    text, state = _model_state(model, now)
    values = {
        "state": text,
        "@state": state,
        "slots": f"{formatting.count(model.free)} of {formatting.count(model.slots)}",
        "queued": formatting.count(ledger.waiting + ledger.scheduled),
        "capacity": formatting.count(model.config.capacity(model.slots)),
        "oldest": formatting.age(stats.oldest_waiting, now),
        "running": formatting.count(ledger.in_flight),
        "done": formatting.count(ledger.done),
        "retried": formatting.count(stats.retried),
        "failed": formatting.count(ledger.dead),
        "@failed": "bad" if ledger.dead else "ok",
    }
    return _with_prefix(f"m.{model.model}.", values)


def _model_state(model: ModelSnapshot, now: float) -> tuple[str, str]:
    if model.reading is not None and model.reading.settings.paused:
        return "paused", "paused"
    states = [endpoint_state(info, now)[0] for info in model.endpoints]
    if "ready" in states:
        return "ready", "ok"
    if not model.slots:
        return "no endpoint", "warn"
    return ("resting", "warn") if "resting" in states else ("no healthy endpoint", "bad")


def _of_endpoint(info: EndpointInfo, now: float) -> dict[str, str]:
    text, state = endpoint_state(info, now)
    overdue = min(info.overdue, info.assigned + info.detached)
    values = {
        "state": text,
        "@state": state,
        "marks": _marks(info),
        "free": formatting.count(info.free),
        "unassigned": formatting.count(info.unassigned),
        "assigned": formatting.count(info.assigned),
        "detached": formatting.count(info.detached),
        "overdue": formatting.count(overdue),
        "@overdue": "bad" if overdue else "ok",
    }
    model, server = info.endpoint.model, info.endpoint.server
    # Without the length, the name could be ambiguous, because the names of models and servers may contain slashes.
    return _with_prefix(f"e.{len(model)}.{model}/{server}.", values)


def _with_prefix(prefix: str, values: dict[str, str]) -> dict[str, str]:
    """Add the prefix to each name, after the leading ``@`` if the name has one."""
    return {
        f"@{prefix}{name[1:]}" if name.startswith("@") else prefix + name: text
        for name, text in values.items()
    }


def _marks(info: EndpointInfo) -> str:
    """Return one mark per slot: assigned, detached, unassigned, free. Return no marks if there are too many slots."""
    if max(info.endpoint.slots, info.held) > _MAX_MARKS:
        return ""
    return "■" * info.assigned + "▣" * info.detached + "◧" * info.unassigned + "□" * info.free
