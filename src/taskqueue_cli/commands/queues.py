"""``taskqueue queue``: show and change the settings of queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, with_backend
from taskqueue_cli.commands.dead_letters import Yes, confirm
from taskqueue_cli.commands.stats import check_known, count, read_queues
from taskqueue_cli.limits import (
    NONE,
    apply_weights,
    describe_limits,
    format_rate,
    parse_number,
    parse_rate,
    parse_seconds,
)
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    note,
    option,
    print_fields,
    print_json,
)
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Control, Order, QueueSettings, control_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import (
    change_settings,
    pause_queue,
    read_settings,
    reset_settings,
)
from taskqueue_core.tasks import QueueStats

Key = Annotated[str, argument("Name of the queue.", metavar="KEY")]
OtherKeys = Annotated[list[str], argument("Queues that store the copies.", metavar="OTHER...")]
Intake = Annotated[bool, typer.Option("--intake", help="Pause or resume publishing, not delivery.")]
Version = Annotated[
    int | None,
    option(
        "Change the settings only if their current version is N. Default: merge with concurrent changes.",
        min=0,
        metavar="N",
    ),
]

_TEXT = (
    "Show and change the limits and the delivery order of queues; pause, resume and bind queues."
)
queue = typer.Typer(
    name="queue", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


@queue.command(name="list")
def listing(*, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """List all queues with their limits."""
    queues, _ = with_backend(server, lambda backend: read_queues(backend, []))
    if as_json:
        print_json([_as_dict(stats.key, settings, stats) for stats, settings in queues])
        return
    if not queues:
        console.print("No queues yet. Publish something: taskqueue publish KEY PAYLOAD")
        return
    table = make_table("queue", numbers=("waiting", "in flight"), texts=("limits",))
    for stats, settings in queues:
        numbers = (count(stats.ledger.waiting), count(stats.ledger.in_flight))
        table.add_row(stats.key, *numbers, ", ".join(describe_limits(settings)))
    console.print(table)


@queue.command()
def show(key: Key, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show the settings of a queue."""

    async def read(backend: Backend) -> QueueSettings:
        control = control_of(backend)
        check_known([key], await control.queues())
        return await control.settings(key)

    settings = with_backend(server, read)
    if as_json:
        print_json(_as_dict(key, settings))
        return
    fields = {}
    for name, value in settings.model_dump(mode="json").items():
        rate = getattr(settings, name) if name.endswith("rate_limit") else None
        shown = _format_value(value) if rate is None else format_rate(rate)
        if name == "weights":
            shown = ", ".join(f"{tenant}={weight}" for tenant, weight in value.items()) or NONE
        fields[name.replace("_", " ")] = shown
    print_fields(fields)


@queue.command(name="set")
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
    retry_base: Annotated[
        float | None,
        option("Seconds before the first retry; doubles with each retry.", metavar="SECONDS"),
    ] = None,
    retry_cap: Annotated[
        float | None, option("Maximum delay between two attempts.", metavar="SECONDS")
    ] = None,
    retry_jitter: Annotated[
        float | None,
        option(
            "Random change of each delay, from 0 to 1: 0.1 means plus or minus 10 %.",
            metavar="SHARE",
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
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change some settings of a queue and keep the others. Changes take effect at once."""
    flags = {
        "paused": paused,
        "intake_paused": intake_paused,
        "order": order,
        "floor_share": floor_share,
        "shards": shards,
        "journal": journal,
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
    if max_processing_time is not None:
        changes["max_processing_time"] = parse_seconds("max_processing_time", max_processing_time)
    policy = {
        "max_attempts": max_attempts,
        "base": retry_base,
        "cap": retry_cap,
        "jitter": retry_jitter,
    }
    retry = {name: value for name, value in policy.items() if value is not None}
    if not (changes or weight or retry):
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

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def bind(
    key: Key,
    others: OtherKeys,
    *,
    topic: Annotated[
        bool,
        typer.Option("--topic", help="Do not store tasks in KEY itself; store only the copies."),
    ] = False,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """For each task that is published to KEY, also store a copy in other queues. Existing bindings are kept."""

    def edit(current: QueueSettings) -> dict[str, Any]:
        own = [] if topic else [key]
        targets = [item for item in current.bound_to or own if not (topic and item == key)]
        return _binding_change(key, [*targets, *others])

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def unbind(
    key: Key,
    others: OtherKeys,
    *,
    version: Version = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop storing copies in other queues. When no binding is left, tasks published to KEY are stored in KEY only."""

    def edit(current: QueueSettings) -> dict[str, Any]:
        for other in others:
            if other not in current.bound_to:
                known = ", ".join(current.bound_to) or f"none, because {key} is not bound"
                raise InvalidInput("OTHER", "a queue that gets no copies from KEY", known)
        return _binding_change(key, [item for item in current.bound_to if item not in others])

    _edit(key, edit, server, version=version, as_json=as_json)


@queue.command()
def pause(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Pause delivery, or publishing with --intake. Running tasks are not affected."""
    _change(key, partial(pause_queue, intake=intake, paused=True), server, as_json=as_json)


@queue.command()
def resume(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Resume delivery, or publishing with --intake."""
    _change(key, partial(pause_queue, intake=intake, paused=False), server, as_json=as_json)


@queue.command()
def reset(
    key: Key, *, version: Version = None, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Reset all settings of a queue to their defaults, including those that are not limits."""
    _change(key, partial(reset_settings, version=version), server, as_json=as_json)


@queue.command()
def delete(
    key: Key, *, yes: Yes = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Delete a queue with its settings and records. It must have no consumers and only ended tasks."""
    if not yes:
        confirm(f"Delete the queue {key} with its settings, permanently?", as_json=as_json)
    done = with_backend(server, lambda backend: control_of(backend).delete(key))
    if as_json:
        print_json({"key": key, "deleted": done.deleted, "forgotten": done.forgotten})
    elif done.deleted:
        ended = f"{count(done.forgotten)} ended task{'' if done.forgotten == 1 else 's'}"
        console.print(f"[green]✔[/] [bold]{key}[/] deleted, with {ended}")
    else:
        note(f"there is no queue {key!r}; nothing was deleted", "yellow")


def _binding_change(key: str, names: list[str]) -> dict[str, Any]:
    unique = list(dict.fromkeys(names))
    return {"bound_to": [] if unique == [key] else unique}


def _edit(
    key: str,
    edit: Callable[[QueueSettings], dict[str, Any]],
    server: str | None,
    *,
    version: int | None,
    as_json: bool,
) -> None:
    """Pass the current settings to ``edit``, and store the changed settings that it returns."""

    def edited(current: QueueSettings) -> QueueSettings:
        return read_settings(msgspec.json.encode(current.model_dump(mode="json") | edit(current)))

    change = partial(change_settings, edit=edited, version=version)
    _change(key, change, server, as_json=as_json)


def _change(
    key: str,
    change: Callable[[Control, str], Awaitable[QueueSettings]],
    server: str | None,
    *,
    as_json: bool,
) -> None:
    async def act(backend: Backend) -> tuple[QueueSettings, bool]:
        control = control_of(backend)
        settings = await change(control, key)
        return settings, bool((await control.ledger(key)).published)

    settings, used = with_backend(server, act)
    if not used:  # warn, because the name of the queue may be mistyped
        note(f"no task has been published to {key!r} yet", "yellow")
    if as_json:
        print_json(_as_dict(key, settings))
        return
    limits = ", ".join(describe_limits(settings)) or "no limits"
    console.print(f"[green]✔[/] [bold]{key}[/]: {limits}  [dim]version {settings.version}")


def _as_dict(key: str, settings: QueueSettings, stats: QueueStats | None = None) -> dict[str, Any]:
    counts = {} if stats is None else {"ledger": stats.ledger}
    return {"key": key, **counts, **settings.model_dump(mode="json")}


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {_format_value(item)}" for name, item in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)
