"""``taskqueue dlq``: list, redrive and discard dead letters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec
import typer
from rich.text import Text

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, record_action, with_backend
from taskqueue_cli.commands.stats import missing_queue, read_queues
from taskqueue_cli.commands.status import Id, Key, NoTask, describe_failure, format_time
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    option,
    print_fields,
    print_json,
)
from taskqueue_core.application.encoding import readable_error, shown_in_place
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import DeadLetters, dead_letters_of
from taskqueue_core.dead_letter_filter import DeadLetterFilter
from taskqueue_core.dead_letter_filter import act as act_on_batch
from taskqueue_core.limits import escape_controls
from taskqueue_core.protocol.frames import to_wire_task
from taskqueue_core.tasks import DeadLetter

T = TypeVar("T")
Ids = Annotated[list[str] | None, argument("Task ids.", metavar="ID")]
All = Annotated[bool, typer.Option("--all", help="Select all dead letters of the queue.")]
Reason = Annotated[str | None, option("Select dead letters with exactly this reason.")]
Error = Annotated[str | None, option("Select dead letters whose last error contains this text.")]
OlderThan = Annotated[
    float | None,
    option("Select dead letters that failed at least this many seconds ago.", metavar="SECONDS"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Limit = Annotated[
    int, typer.Option(min=1, max=10_000, help="Maximum number of dead letters to list.")
]

_TEXT = "List, inspect, redrive and discard dead letters."
dlq = typer.Typer(
    name="dlq", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


@dlq.command(name="list")
def listing(
    key: Annotated[
        str | None, argument("Queue. Default: the queues that have dead letters.", metavar="KEY")
    ] = None,
    *,
    limit: Limit = 100,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters of a queue, oldest first; without KEY, the queues that have dead letters, with their number."""
    if key is None:
        _list_queues(server, as_json=as_json)
        return

    async def read(backend: Backend) -> tuple[DeadLetter, ...]:
        found = await dead_letters_of(backend).list(key, limit=limit)
        return found or await _nothing(backend, key, found)

    dead_letters = with_backend(server, read)
    if as_json:
        print_json([_as_dict(dead_letter) for dead_letter in dead_letters])
        return
    if not dead_letters:
        console.print(f"No dead letters in [bold]{key}[/].")
        return
    table = make_table(
        "id", numbers=("attempts", "losses", "failed at"), texts=("reason", "last error")
    )
    for letter in dead_letters:
        numbers = (str(letter.attempt), str(letter.losses), format_time(letter.failed_at))
        last_error = readable_error(None, letter.history[-1].error) if letter.history else ""
        texts = (Text(escape_controls(text)) for text in (letter.reason, last_error))
        table.add_row(letter.task.id, *numbers, *texts)
    console.print(table)
    if len(dead_letters) == limit:
        console.print("[dim]There may be more dead letters; use --limit to list more.")


def _list_queues(server: str | None, *, as_json: bool) -> None:
    queues, _ = with_backend(server, lambda backend: read_queues(backend, []))
    numbers = {stats.key: stats.ledger.dead for stats, _ in queues if stats.ledger.dead}
    if as_json:
        print_json([{"key": key, "dead": dead} for key, dead in numbers.items()])
        return
    if not numbers:
        console.print("No queue has dead letters.")
        return
    table = make_table("queue", numbers=("dead letters",))
    for key, dead in numbers.items():
        table.add_row(key, f"{dead:,}")
    console.print(table)


@dlq.command()
def show(key: Key, task_id: Id, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show one dead letter with its payload and history."""

    async def read(backend: Backend) -> DeadLetter | None:
        found = await dead_letters_of(backend).get(key, task_id)
        return found or await _nothing(backend, key, found)

    dead_letter = with_backend(server, read)
    if dead_letter is None:
        raise NoTask(f"there is no dead letter {task_id!r} in queue {key!r}")
    if as_json:
        print_json(_as_dict(dead_letter))
        return
    fields = {
        "task": dead_letter.task.id,
        "reason": dead_letter.reason,
        "attempts": str(dead_letter.attempt),
        "losses": str(dead_letter.losses),
        "failed at": format_time(dead_letter.failed_at),
        "payload": shown_in_place(dead_letter.task.payload, dead_letter.task.headers)
        or msgspec.json.format(dead_letter.task.payload, indent=2).decode(),
        "history": "\n".join(map(describe_failure, dead_letter.history)),
    }
    if dead_letter.history and dead_letter.history[-1].traceback:
        fields["traceback"] = dead_letter.history[-1].traceback.rstrip()
    print_fields(fields)


def _action(verb: str, done: str, *, permanent: bool) -> Callable[..., None]:
    def command(
        key: Key,
        ids: Ids = None,
        *,
        everything: All = False,
        reason: Reason = None,
        error: Error = None,
        older_than: OlderThan = None,
        yes: Yes = False,
        server: ServerUrl = None,
        as_json: AsJson = False,
    ) -> None:
        conditions = {"reason": reason, "error": error, "older_than": older_than}
        _check_selection(ids, conditions, everything=everything)
        if (permanent or everything) and not yes:
            plural = "" if ids and len(ids) == 1 else "s"
            what = f"{len(ids)} dead letter{plural}" if ids else "all dead letters"
            matching = " that match the conditions" if any(conditions.values()) else ""
            ending = ", permanently" if permanent else ""
            confirm(f"{verb.capitalize()} {what} of {key}{matching}{ending}?", as_json=as_json)

        async def act(backend: Backend) -> int:
            number = await _act(backend, verb, key, ids or [], conditions)
            if number:
                shown = [
                    f"{name}={value}" for name, value in conditions.items() if value is not None
                ]
                details = " ".join(shown or (["ids:", *ids] if ids else ["all"]))
                await record_action(backend, verb, key, tasks=number, details=details)
            return number or await _nothing(backend, key, number)

        count = with_backend(server, act)
        if as_json:
            print_json({"count": count})
        else:
            console.print(f"{count:,} dead letter{'' if count == 1 else 's'} {done}")

    return command


dlq.command(
    "redrive", help="Move dead letters back to the queue, with a new allowance of attempts."
)(_action("redrive", "redriven", permanent=False))
dlq.command("discard", help="Discard dead letters permanently. This cannot be undone.")(
    _action("discard", "discarded", permanent=True)
)


def _check_selection(
    ids: list[str] | None, conditions: dict[str, str | float | None], *, everything: bool
) -> None:
    any_given = any(value is not None for value in conditions.values())
    if bool(ids) + everything + any_given != 1:
        raise typer.BadParameter(
            "give either task ids, or --all, or conditions (--reason, --error, --older-than)",
            param_hint="ID",
        )


def confirm(question: str, *, as_json: bool) -> None:
    """Ask for confirmation, and exit if it is not given. Raises `BadParameter` if it is impossible to ask."""
    if as_json or not sys.stdin.isatty():
        raise typer.BadParameter(
            "cannot ask for confirmation with --json or without a terminal: add --yes",
            param_hint="--yes",
        )
    if not typer.confirm(question):
        raise typer.Exit(1)


async def _act(
    backend: Backend, verb: str, key: str, ids: list[str], conditions: dict[str, str | float | None]
) -> int:
    dead_letters = dead_letters_of(backend)
    if any(value is not None for value in conditions.values()):
        await backend.health()  # a remote backend learns the server's time only from a response
        return await act_on_all(dead_letters, verb, key, backend.now(), **conditions)
    act = dead_letters.redrive if verb == "redrive" else dead_letters.discard
    return await act(key, *ids)


async def _nothing(backend: Backend, key: str, found: T) -> T:
    """Return ``found``, which is nothing. Raises `NoTask` if there is no such queue."""
    if missing := await missing_queue(backend, key):
        raise NoTask(missing)
    return found


def _as_dict(dead_letter: DeadLetter) -> dict[str, Any]:
    fields = {name: getattr(dead_letter, name) for name in dead_letter.__struct_fields__}
    return fields | {"task": to_wire_task(dead_letter.task)}


@runtime_checkable
class FiltersDeadLetters(Protocol):
    """The `DeadLetters` of a backend that applies a filter itself, for example on its server."""

    async def act_on_filter(self, verb: str, key: str, now: float, **conditions: Any) -> int:
        """Redrive or discard (``verb``) the dead letters that match the conditions; return their number."""


async def act_on_all(
    dead_letters: DeadLetters, verb: str, key: str, now: float, **conditions: Any
) -> int:
    """Redrive or discard (``verb``) all dead letters that match the conditions, and return their number.

    The conditions are the arguments of `DeadLetterFilter.of`.
    """
    if isinstance(dead_letters, FiltersDeadLetters):
        return await dead_letters.act_on_filter(verb, key, now, **conditions)
    dead_letter_filter, count, after = DeadLetterFilter.of(now, **conditions), 0, None
    while True:
        batch, after = await act_on_batch(
            dead_letters, key, dead_letter_filter, getattr(dead_letters, verb), after=after
        )
        count += batch
        if after is None:
            return count
