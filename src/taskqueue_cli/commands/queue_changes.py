"""``taskqueue queue set``, and the steps that all commands share which change the settings of a queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

from taskqueue_cli.backends import ServerUrl, record_action, with_backend
from taskqueue_cli.limits import (
    NONE,
    apply_weights,
    describe_limits,
    parse_delays,
    parse_names,
    parse_number,
    parse_rate,
    parse_seconds,
)
from taskqueue_cli.output import AsJson, argument, console, note, option, print_json
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Control, Order, QueueSettings, control_of
from taskqueue_core.queue_settings import (
    by_operator,
    change_settings,
    give_back,
    name_change,
    read_settings,
)
from taskqueue_core.tasks import QueueStats

Key = Annotated[str, argument("Name of the queue.", metavar="KEY")]
Version = Annotated[
    int | None,
    option(
        "Change the settings only if their current version is N. Default: merge with concurrent changes.",
        min=0,
        metavar="N",
    ),
]


def change(
    key: Key,
    *,
    capacity: Annotated[
        str | None,
        option(
            "Maximum number of undelivered tasks; beyond it, publishing is refused.",
            metavar=f"N|{NONE}",
        ),
    ] = None,
    max_inflight: Annotated[
        str | None,
        option("Maximum number of tasks in flight across all workers.", metavar=f"N|{NONE}"),
    ] = None,
    rate: Annotated[
        str | None,
        option(
            "Maximum delivery rate, for example 1000/1s, 100/1m or 15/1h.", metavar=f"N/TIME|{NONE}"
        ),
    ] = None,
    max_processing_time: Annotated[
        str | None,
        option(
            "Redeliver a task after this many seconds without progress.", metavar=f"SECONDS|{NONE}"
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        option("End an attempt after this many seconds, as failed.", metavar=f"SECONDS|{NONE}"),
    ] = None,
    order: Annotated[
        Order | None,
        option(
            "Order of delivery: fifo (first in, first out) or fair (tenants take turns). --weight and the --tenant-... "
            "options require fair."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        option(
            "Weight of a tenant: the number of its turns for each turn of a tenant without a weight. May be repeated. "
            f"'TENANT={NONE}' removes the weight of a tenant, '{NONE}' alone removes all weights.",
            metavar=f"TENANT=N|{NONE}",
        ),
    ] = None,
    tenant_capacity: Annotated[
        str | None, option("Like --capacity, but for each tenant.", metavar=f"N|{NONE}")
    ] = None,
    tenant_max_inflight: Annotated[
        str | None, option("Like --max-inflight, but for each tenant.", metavar=f"N|{NONE}")
    ] = None,
    tenant_rate: Annotated[
        str | None, option("Like --rate, but for each tenant.", metavar=f"N/TIME|{NONE}")
    ] = None,
    floor_share: Annotated[
        float | None,
        option(
            "Share of deliveries reserved for each waiting priority, from 0 to 0.5: 0.1 means one in ten.",
            metavar="SHARE",
        ),
    ] = None,
    shards: Annotated[
        int | None,
        option(
            "Number of shards, spread over the partitions of the store. Must be 1 for a queue that is in a binding, "
            "or that has fair order, a floor share, or a limit on capacity, rate or tasks in flight.",
            metavar="N",
        ),
    ] = None,
    max_attempts: Annotated[
        int | None,
        option(
            "Maximum number of attempts, including the first; then the task becomes a dead letter.",
            metavar="N",
        ),
    ] = None,
    result_ttl: Annotated[
        float | None, option("Seconds for which results are kept.", metavar="SECONDS")
    ] = None,
    index: Annotated[
        list[str] | None,
        option(
            "Name of the tags by which tasks can be found: user for user:42. May be repeated, and replaces the names "
            f"that are set; '{NONE}' alone removes them. It applies to tasks that are published from then on.",
            metavar=f"NAME|{NONE}",
        ),
    ] = None,
    keep_ended: Annotated[
        float | None,
        option("Seconds for which ended tasks can be listed; 0: as long as their ids are known."),
    ] = None,
    keep_ended_most: Annotated[
        int | None,
        option("Maximum number of ended tasks of each state that --keep-ended keeps.", metavar="N"),
    ] = None,
    stream_events: Annotated[
        int | None,
        option("Maximum number of events that are kept of each task.", metavar="N"),
    ] = None,
    stream_bytes: Annotated[
        int | None,
        option("Maximum number of bytes of the events that are kept of each task.", metavar="N"),
    ] = None,
    stream_ttl: Annotated[
        float | None,
        option("Seconds for which events are kept after the end of their task.", metavar="SECONDS"),
    ] = None,
    retry_base: Annotated[
        float | None,
        option("Seconds before the first retry.", metavar="SECONDS"),
    ] = None,
    retry_factor: Annotated[
        float | None,
        option("Number by which the delay grows with each retry. Default: 2.", metavar="FACTOR"),
    ] = None,
    retry_cap: Annotated[
        float | None, option("Maximum delay between two attempts.", metavar="SECONDS")
    ] = None,
    retry_delays: Annotated[
        str | None,
        option(
            "Delays before the first, second ... retry, for example 5,60,900, instead of base, factor and cap. The "
            "last one repeats.",
            metavar=f"SECONDS,...|{NONE}",
        ),
    ] = None,
    retry_jitter: Annotated[
        float | None,
        option(
            "Random change of each delay, from 0 to 1: 0.1 means plus or minus 10 %.",
            metavar="SHARE",
        ),
    ] = None,
    keep_tracebacks: Annotated[
        bool | None,
        option(
            "Keep the tracebacks of the last failures of each task.",
            "--keep-tracebacks/--no-keep-tracebacks",
        ),
    ] = None,
    journal: Annotated[
        bool | None,
        option(
            "Record every state change in the journal, which `taskqueue pipeline` reads.",
            "--journal/--no-journal",
        ),
    ] = None,
    paused: Annotated[bool | None, option("Stop or resume delivery.", "--paused/--resumed")] = None,
    intake_paused: Annotated[
        bool | None, option("Stop or resume publishing.", "--intake-paused/--intake-resumed")
    ] = None,
    returned: Annotated[
        list[str] | None,
        option(
            "Let the declaration of the tasks determine a field again: the next `taskqueue apply` sets it. May be "
            "repeated.",
            "--give-back",
            metavar="FIELD",
        ),
    ] = None,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change some settings of a queue and keep the others. Changes take effect at once.

    `taskqueue apply` leaves the changed fields as they are, until they are given back.
    """
    flags = {
        "paused": paused,
        "intake_paused": intake_paused,
        "order": order,
        "floor_share": floor_share,
        "shards": shards,
        "keep_tracebacks": keep_tracebacks,
        "journal": journal,
        "result_ttl": result_ttl,
        "index": None if index is None else parse_names(index),
        "keep_ended": keep_ended,
        "keep_ended_most": keep_ended_most,
        "stream_events": stream_events,
        "stream_bytes": stream_bytes,
        "stream_ttl": stream_ttl,
    }
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    numbers = {
        "capacity": capacity,
        "max_inflight": max_inflight,
        "tenant_capacity": tenant_capacity,
        "tenant_max_inflight": tenant_max_inflight,
    }
    changes |= {
        name: parse_number(name, text) for name, text in numbers.items() if text is not None
    }
    for name, limit in (("rate", rate), ("tenant_rate", tenant_rate)):
        if limit is not None:
            changes[f"{name}_limit"] = parse_rate(name, limit)
    for name, text in (("max_processing_time", max_processing_time), ("timeout", timeout)):
        if text is not None:
            changes[name] = parse_seconds(name, text)
    policy = {
        "max_attempts": max_attempts,
        "base": retry_base,
        "factor": retry_factor,
        "cap": retry_cap,
        "delays": None if retry_delays is None else parse_delays("retry_delays", retry_delays),
        "jitter": retry_jitter,
    }
    retry = {name: value for name, value in policy.items() if value is not None}
    returned = [name.replace("-", "_") for name in returned or []]
    if not (changes or weight or retry or returned):
        raise typer.BadParameter(
            "nothing to set: give an option such as --capacity, --max-attempts or --rate"
        )
    apply_weights({}, weight or [])  # report an invalid weight before connecting to the backend

    def edit(current: QueueSettings) -> dict[str, Any]:
        edited = dict(changes)
        if weight:
            edited["weights"] = apply_weights(current.weights, weight)
        if retry:
            edited["retry"] = current.retry.model_dump() | retry
        return edited

    edit_settings(key, edit, server, version=version, as_json=as_json, returned=returned)


def edit_settings(
    key: str,
    edit: Callable[[QueueSettings], dict[str, Any]],
    server: str | None,
    *,
    version: int | None,
    as_json: bool,
    returned: Sequence[str] = (),
) -> None:
    """Pass the current settings to ``edit``, and store the changed settings that it returns.

    The declaration owns the fields in ``returned`` again.
    """

    def edited(current: QueueSettings) -> QueueSettings:
        changed = current.model_dump(mode="json") | edit(current)
        return give_back(
            by_operator(current, read_settings(msgspec.json.encode(changed))), returned
        )

    change = partial(change_settings, edit=edited, version=version)
    change_and_show(key, change, server, as_json=as_json)


def change_and_show(
    key: str,
    change: Callable[[Control, str], Awaitable[QueueSettings]],
    server: str | None,
    *,
    as_json: bool,
) -> None:
    """Change the settings of a queue with ``change``, and show the result."""

    async def act(backend: Backend) -> tuple[QueueSettings, bool]:
        control = control_of(backend)
        before = await control.settings(key)
        settings = await change(control, key)
        if settings != before:
            action, details = name_change(before, settings)
            await record_action(backend, action, key, details=details)
        return settings, bool((await control.ledger(key)).published)

    settings, used = with_backend(server, act)
    if not used:  # warn, because the name of the queue may be mistyped
        note(f"no task has been published to {key!r} yet", "yellow")
    if as_json:
        print_json(as_dict(key, settings))
        return
    limits = ", ".join(describe_limits(settings)) or "no limits"
    console.print(f"[green]✔[/] [bold]{key}[/]: {limits}  [dim]version {settings.version}")


def as_dict(key: str, settings: QueueSettings, stats: QueueStats | None = None) -> dict[str, Any]:
    """Return the settings of a queue for JSON, with its ledger if its statistics are given."""
    counts = {} if stats is None else {"ledger": stats.ledger}
    return {"key": key, **counts, **settings.model_dump(mode="json")}
