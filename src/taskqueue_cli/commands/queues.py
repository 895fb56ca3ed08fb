"""``taskqueue queue``: show and change the settings of queues."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, record_action, with_backend
from taskqueue_cli.commands import queue_changes
from taskqueue_cli.commands.dead_letters import Yes, confirm
from taskqueue_cli.commands.queue_changes import (
    Key,
    Version,
    as_dict,
    change_and_show,
    edit_settings,
)
from taskqueue_cli.commands.stats import check_known, count, read_queues
from taskqueue_cli.limits import NONE, describe_limits, format_rate
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    note,
    print_fields,
    print_json,
)
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import DeletedQueue, QueueSettings, control_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import pause_queue, reset_settings

OtherKeys = Annotated[list[str], argument("Queues that store the copies.", metavar="OTHER...")]
Intake = Annotated[bool, typer.Option("--intake", help="Pause or resume publishing, not delivery.")]

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
        print_json([as_dict(stats.key, settings, stats) for stats, settings in queues])
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
        print_json(as_dict(key, settings))
        return
    fields = {}
    for name, value in settings.model_dump(mode="json").items():
        rate = getattr(settings, name) if name.endswith("rate_limit") else None
        shown = _format_value(value) if rate is None else format_rate(rate)
        if name == "weights":
            shown = ", ".join(f"{tenant}={weight}" for tenant, weight in value.items()) or NONE
        fields[name.replace("_", " ")] = shown
    print_fields(fields)


queue.command(name="set")(queue_changes.change)


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

    edit_settings(key, edit, server, version=version, as_json=as_json)


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

    edit_settings(key, edit, server, version=version, as_json=as_json)


@queue.command()
def pause(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Pause delivery, or publishing with --intake. Running tasks are not affected."""
    change_and_show(key, partial(pause_queue, intake=intake, paused=True), server, as_json=as_json)


@queue.command()
def resume(
    key: Key, *, intake: Intake = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Resume delivery, or publishing with --intake."""
    change_and_show(key, partial(pause_queue, intake=intake, paused=False), server, as_json=as_json)


@queue.command()
def reset(
    key: Key, *, version: Version = None, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Reset all settings of a queue to their defaults, including those that are not limits."""
    change_and_show(key, partial(reset_settings, version=version), server, as_json=as_json)


@queue.command()
def delete(
    key: Key, *, yes: Yes = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Delete a queue with its settings and records. It must have no consumers and only ended tasks."""
    if not yes:
        confirm(f"Delete the queue {key} with its settings, permanently?", as_json=as_json)

    async def act(backend: Backend) -> DeletedQueue:
        done = await control_of(backend).delete(key)
        if done.deleted:
            await record_action(backend, "delete queue", key)
        return done

    done = with_backend(server, act)
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
