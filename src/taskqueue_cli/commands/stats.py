"""``taskqueue stats``: show the ledgers of queues; ``taskqueue workers``: show the connected workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.backends import ServerUrl, with_backend
from taskqueue_cli.limits import describe_limits
from taskqueue_cli.output import FAILED, AsJson, argument, console, make_table, print_json
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import TaskQueueError, UnknownKey
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.tasks import Ledger, QueueStats, WorkerInfo

_MAX_SHOWN = 10
"""maximum number of queues that an error names"""
_AT_ONCE = 100
"""number of queues that are read at the same time; the Redis backend reads them with few commands"""
_LEDGER = Ledger.__struct_fields__
_ALWAYS = ("published", "waiting", "in_flight", "done", "dead")
_FLOW = ("delivered", "redelivered", "retried", "lost", "subscribers")


def show(
    keys: Annotated[
        list[str] | None, argument("Queues to show. Default: all queues.", metavar="KEY")
    ] = None,
    *,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the ledgers of all queues, or of the given queues."""
    queues, now = with_backend(server, lambda backend: read_queues(backend, keys or []))
    if as_json:
        print_json([_as_dict(stats, settings) for stats, settings in queues])
    elif queues:
        _print([stats for stats, _ in queues], now)
        for stats, settings in queues:
            if limits := describe_limits(settings):
                console.print(f"[bold]{stats.key}[/]: {', '.join(limits)}")
    else:
        console.print("No queues yet. Publish something: taskqueue publish KEY PAYLOAD")
    if not all(stats.ledger.balanced for stats, _ in queues):
        raise typer.Exit(FAILED)


def workers(*, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show the connected workers, with their queues and their number of running tasks."""

    async def read(backend: Backend) -> tuple[tuple[WorkerInfo, ...], float]:
        return await control_of(backend).workers(), backend.now()

    connected, now = with_backend(server, read)
    if as_json:
        print_json(connected)
        return
    if not connected:
        console.print("No workers are connected. Start one: taskqueue worker MODULE:ATTR")
        return
    table = make_table("worker", numbers=("in flight", "connections", "since"), texts=("queues",))
    for worker in connected:
        since = f"{max(0.0, now - worker.since):,.0f} s"
        numbers = (count(worker.in_flight), count(worker.connections), since)
        table.add_row(Text(worker.worker_id), *numbers, Text(", ".join(worker.keys)))
    console.print(table)


def check_known(keys: Iterable[str], known: Sequence[str]) -> None:
    """Raise `UnknownKey` if one of ``keys`` is not in ``known``, because its name is probably mistyped."""
    for key in keys:
        if key not in known:
            shown = nearest_first(key, known, _MAX_SHOWN) or "none exists yet"
            raise UnknownKey("KEY", f"the unknown queue {key!r}", f"an existing queue ({shown})")


async def missing_queue(backend: Backend, key: str) -> str | None:
    """Return that there is no queue ``key``, with the existing queues, the most similar one first.

    Return ``None`` if it exists, or if this command can see no queues: a token may be allowed to see none, or some.
    """
    try:
        known = await control_of(backend).queues()
    except TaskQueueError:
        return None
    if not known or key in known:
        return None
    shown = nearest_first(key, known, _MAX_SHOWN)
    return f"there is no queue {key!r} among those that this command can see: {shown}"


async def read_queues(
    backend: Backend, keys: list[str]
) -> tuple[list[tuple[QueueStats, QueueSettings]], float]:
    """Return the statistics and settings of ``keys`` (of all queues if ``keys`` is empty), and the store's time."""
    control = control_of(backend)
    known = await control.queues()
    check_known(keys, known)

    async def read(key: str) -> tuple[QueueStats, QueueSettings]:
        stats, settings = await asyncio.gather(control.stats(key), control.settings(key))
        return stats, settings

    names, results = keys or known, list[tuple[QueueStats, QueueSettings]]()
    for start in range(0, len(names), _AT_ONCE):
        results += await gather_all(map(read, names[start : start + _AT_ONCE]))
    return results, backend.now()


def _as_dict(stats: QueueStats, settings: QueueSettings) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(stats)
    fields["ledger"]["balanced"] = stats.ledger.balanced
    values = settings.model_dump(mode="json")
    names = (*settings.flow, *settings.ordering, *(["bound_to"] if settings.bound_to else []))
    return fields | {"flow": {name: values[name] for name in names}}


def _print(queues: list[QueueStats], now: float) -> None:
    total = sum((stats.ledger for stats in queues), Ledger())
    shown = [name for name in _LEDGER if name in _ALWAYS or getattr(total, name)]
    columns = [name.replace("_", " ") for name in (*shown, "balanced")]
    ledgers = make_table("queue", numbers=columns, padding=0)
    for stats in queues:
        ledgers.add_row(stats.key, *_cells(stats.ledger, shown))
    if len(queues) > 1:
        ledgers.add_section()
        ledgers.add_row("all", *_cells(total, shown), style="bold")
    counted = [*_FLOW, *(["blocked_on_dead"] if any(map(_held, queues)) else [])]
    titles = [name.replace("_", " ") for name in (*counted, "oldest")]
    flow = make_table("queue", numbers=titles, padding=0)
    for stats in queues:
        oldest = stats.oldest_waiting
        age = "[dim]-" if oldest is None else f"{max(0.0, now - oldest):,.1f} s"
        flow.add_row(stats.key, *(count(getattr(stats, name)) for name in counted), age)
    console.print(ledgers)
    console.print(flow)
    hidden = [name for name in _LEDGER if name not in shown]
    if hidden:
        console.print(f"[dim]Zero in all queues: {', '.join(hidden)}.")


def _held(stats: QueueStats) -> bool:
    return stats.blocked_on_dead > 0


def _cells(ledger: Ledger, shown: list[str]) -> list[str]:
    mark = "[green]✔" if ledger.balanced else f"[bold red]off by {ledger.imbalance:+,}"
    return [*(count(getattr(ledger, name)) for name in shown), mark]


def count(number: int) -> str:
    """Return a number as Rich markup for a table cell; zero is dimmed."""
    return f"{number:,}" if number else "[dim]0"
