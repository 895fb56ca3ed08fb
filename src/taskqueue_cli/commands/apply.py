"""``taskqueue apply``: write what tasks declare into the settings of their queues, and into schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from pydantic import BaseModel

from taskqueue_cli.backends import ServerUrl, with_backend
from taskqueue_cli.limits import NONE, format_rate
from taskqueue_cli.output import AsJson, argument, console, print_json
from taskqueue_core.application.applying import Difference, apply_declarations
from taskqueue_core.application.declared_schedules import AppliedSchedule, ScheduleChange
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.rate_limit import RateLimit
from taskqueue_worker import BaseWorker, load_worker

_SCHEDULES = {
    ScheduleChange.CREATED: "created",
    ScheduleChange.CHANGED: "changed",
    ScheduleChange.DELETED: "deleted",
    ScheduleChange.KEPT: "[yellow]kept[/], because it was put at run time or by another registry",
    ScheduleChange.UNDECLARED: "declared no more; --prune deletes it",
}
_WRITTEN = (ScheduleChange.CREATED, ScheduleChange.CHANGED, ScheduleChange.DELETED)
Target = Annotated[
    str | None,
    argument("Registry of tasks, or worker, for example shop.tasks:tasks.", metavar="MODULE:ATTR"),
]


def loaded(target: str | None) -> BaseWorker:
    """Return the worker that a target names. Raises `ConfigurationError`."""
    if target is None:
        raise ConfigurationError(
            "MODULE:ATTR is missing: name the registry of tasks, or the worker, for example shop.tasks:tasks"
        )
    return load_worker(target)


def apply(
    target: Target = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the differences, and change nothing.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Reset settings, and delete schedules, that were declared before and are declared no more.",
        ),
    ] = False,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Write what tasks declare into the store: settings of their queues, and schedules. Print what has changed.

    A schedule that is paused stays paused. What an operator has set stays as it is, until it is given back with
    `taskqueue queue set KEY --give-back FIELD`.
    """
    worker = loaded(target)
    declared, schedules = worker.declared(), worker.declared_schedules()
    applied = with_backend(
        server,
        lambda backend: apply_declarations(
            backend, declared, schedules, prune=prune, dry_run=dry_run
        ),
    )
    if as_json:
        groups = msgspec.structs.asdict(applied)
        print_json({"dry_run": dry_run} | {name: _as_json(each) for name, each in groups.items()})
        return
    for each in applied.changed:
        console.print(f"[bold]{each.key}[/]: {describe(each)}")
    for each in applied.kept:
        console.print(
            f"[bold]{each.key}[/]: [yellow]kept[/] {each.field}, set by an operator ({describe(each)} is declared); "
            f"--give-back {each.field} returns it"
        )
    for each in applied.undeclared:
        console.print(
            f"[bold]{each.key}[/]: {each.field} is declared no more ({describe(each)}); --prune resets it"
        )
    for schedule in applied.schedules:
        console.print(f"schedule [bold]{schedule.name}[/]: {_SCHEDULES[schedule.change]}")
    number = len(applied.changed)
    words = f"queues: {len(declared)}, {'settings to change' if dry_run else 'settings changed'}: {number}"
    if known := sum(len(each.schedules) for each in schedules):
        changed = sum(each.change in _WRITTEN for each in applied.schedules)
        words += f", schedules: {known}, {'to change' if dry_run else 'changed'}: {changed}"
    console.print(f"[green]✔[/] {words}")


def describe(difference: Difference) -> str:
    """Return a field of a queue's settings with its stored and its declared value, for people."""
    stored, declared = difference.stored, difference.declared
    if difference.field == "retry":
        before, after = stored.model_dump(), declared.model_dump()
        changes = (
            f"{name} {_shown(before[name])} → {_shown(value)}"
            for name, value in after.items()
            if before[name] != value
        )
        return f"retry {', '.join(changes)}"
    return f"{difference.field} {_shown(stored)} → {_shown(declared)}"


def _shown(value: object) -> str:
    match value:
        case None:
            return NONE
        case RateLimit():
            return format_rate(value)
        case Mapping():
            return " ".join(f"{name}={item}" for name, item in value.items()) or NONE
        case tuple():
            return " ".join(map(_shown, value)) or NONE
        case float():
            return f"{value:g}"
    return str(value)


def _as_json(differences: Sequence[Difference | AppliedSchedule]) -> list[dict[str, Any]]:
    return [
        {
            name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            for name, value in msgspec.structs.asdict(each).items()
        }
        for each in differences
    ]
