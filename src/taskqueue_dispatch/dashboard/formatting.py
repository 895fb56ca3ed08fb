"""Figures of the page as people read them; every text that changes by itself has a name here."""

from __future__ import annotations

import hashlib

from taskqueue_core.capabilities import EndpointInfo, QueueSettings
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_dispatch.dashboard.snapshot import ModelSnapshot, PoolSnapshot
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.snapshot import Snapshot, StoreReading

_JOBS_ANEW = 3
"""moments after which the list of running jobs is loaded again"""
_MARKS = 24
"""slots that are drawn one by one"""


def texts(snapshot: PoolSnapshot, sample: Snapshot) -> dict[str, str]:
    """Return all texts of the page by their names."""
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
    """Return a word that changes when the page has other parts than before, not only other figures."""
    parts = [
        snapshot.error,
        [model.name for model in snapshot.models],
        [(info.endpoint, info.draining, info.removed) for info in snapshot.endpoints],
        snapshot.number // _JOBS_ANEW if snapshot.jobs else None,
    ]
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:12]


def state_of(info: EndpointInfo, now: float) -> tuple[str, str]:
    """Say whether an endpoint gets jobs: words, and the state that gives them their colour."""
    if info.removed:
        return "removed", "warn"
    if info.draining:
        return "draining", "paused"
    if not info.healthy:
        return "not healthy", "bad"
    if info.resting_until is not None and info.resting_until > now:
        return "resting", "warn"
    return "ready", "ok"


def _store(snapshot: PoolSnapshot, sample: Snapshot) -> dict[str, str]:
    error = snapshot.error or sample.error
    if error is not None:
        return {"store": f"does not answer ({error})", "@store": "bad"}
    well = sample.health.ok
    return {"store": "answers" if well else "is not well", "@store": "ok" if well else "bad"}


def _of_model(model: ModelSnapshot, now: float) -> dict[str, str]:
    reading = model.reading or StoreReading(
        QueueStats(key=model.queue, ledger=Ledger()), QueueSettings()
    )
    ledger, stats, name = reading.ledger, reading.stats, f"m.{model.name}."
    names, state = _model_state(model, now)
    values = {
        "state": names,
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
    return {_named(name, key): text for key, text in values.items()}


def _model_state(model: ModelSnapshot, now: float) -> tuple[str, str]:
    if model.reading is not None and model.reading.settings.paused:
        return "paused", "paused"
    states = [state_of(info, now)[0] for info in model.endpoints]
    if "ready" in states:
        return "ready", "ok"
    if not model.slots:
        return "no endpoint", "warn"
    return ("resting", "warn") if "resting" in states else ("no healthy endpoint", "bad")


def _of_endpoint(info: EndpointInfo, now: float) -> dict[str, str]:
    names, state = state_of(info, now)
    overdue = min(info.overdue, info.assigned + info.detached)
    values = {
        "state": names,
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
    # The length tells where the model ends: both names may have slashes.
    name = f"e.{len(model)}.{model}/{server}."
    return {_named(name, key): text for key, text in values.items()}


def _named(name: str, key: str) -> str:
    return f"@{name}{key[1:]}" if key.startswith("@") else f"{name}{key}"


def _marks(info: EndpointInfo) -> str:
    """Draw the slots: filled where a job runs, half where one is held, empty where none is."""
    if max(info.endpoint.slots, info.held) > _MARKS:
        return ""
    return "■" * info.assigned + "▣" * info.detached + "◧" * info.unassigned + "□" * info.free
