"""``taskqueue workflow``: workflows in the store, whose steps wait for one another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from rich.markup import escape

from taskqueue_cli.backends import BACKEND_HELP, ServerUrl, with_backend
from taskqueue_cli.commands.dead_letters import Yes, confirm
from taskqueue_cli.commands.status import format_time
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
from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.errors import UnknownKey
from taskqueue_core.queue import Queue
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_core.task_state import State
from taskqueue_core.workflow_list import LISTED
from taskqueue_core.workflows import StepStatus, WorkflowStatus, WorkflowSummary

T = TypeVar("T")
Id = Annotated[str, argument("Id of the workflow.", metavar="ID")]
_NAMED = 3
"""maximum number of dead letters that a list names for a workflow"""
_TEXT = "List, show and cancel workflows, whose steps wait for one another."
workflow = typer.Typer(
    name="workflow", help=f"{_TEXT}\n\n{BACKEND_HELP}", short_help=_TEXT, no_args_is_help=True
)


def _with(server: str | None, act: Callable[[QueueWorkflows], Awaitable[T]]) -> T:
    async def run(backend: Backend) -> T:
        return await act(Queue(backend).workflows)

    return with_backend(server, run)


async def _found(workflows: QueueWorkflows, name: str) -> WorkflowStatus:
    found = await workflows.get(name)
    if found is None:
        raise UnknownKey("ID", "a workflow that does not exist", "the id of a workflow")
    return found


@workflow.command(name="list")
def listing(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=LISTED, help="Maximum number of workflows.")
    ] = 20,
    after: Annotated[
        str | None,
        option(
            "Continue after a list that had more workflows, which printed this.", metavar="CURSOR"
        ),
    ] = None,
    server: ServerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List workflows: first those whose steps are not all published, then the others, newest first.

    A workflow is remembered for a week. Through a server, the list has those that the token may read.
    """
    page = _with(server, lambda workflows: workflows.list(after=after, limit=limit))
    if as_json:
        print_json(page)
        return
    if page.workflows:
        table = make_table(
            "workflow", numbers=("steps", "done"), texts=("state", "changed", "note")
        )
        for found in page.workflows:
            table.add_row(*map(escape, _summary(found)))
        console.print(table)
    elif page.next is None:
        console.print("No workflows.")
    if page.next is not None:
        note(
            f"There are more workflows: taskqueue workflow list --limit {limit} --after {page.next}"
        )


def _summary(found: WorkflowSummary) -> tuple[str, ...]:
    held = ", ".join(ref.task_id for ref in found.held_by[:_NAMED])
    return (
        found.id,
        f"{found.steps:,}" if found.steps else "",
        f"{found.counts.get(State.DONE, 0):,}" if found.steps else "",
        found.state.value,
        "" if found.updated_at is None else format_time(found.updated_at),
        found.problem or (f"held by {held}" if held else ""),
    )


@workflow.command()
def show(name: Id, *, server: ServerUrl = None, as_json: AsJson = False) -> None:
    """Show a workflow: its steps by state, what they wait for, and the dead letters that hold them."""
    found = _with(server, lambda workflows: _found(workflows, name))
    if as_json:
        print_json(found)
        return
    print_fields({"id": found.id, "state": found.state.value, "problem": found.problem or ""})
    if not found.steps:
        return
    table = make_table("step", texts=("queue", "state", "after", "changed", "note"))
    for step in found.steps:
        table.add_row(*map(escape, _row(step)))
    console.print(table)


def _row(step: StepStatus) -> tuple[str, ...]:
    status = step.status
    changed, note = "", ""
    if status is not None:
        changed, note = format_time(status.updated_at), status.error or ""
        if status.held_by:
            note = "held by " + ", ".join(ref.task_id for ref in status.held_by)
    parents = ", ".join(
        f"{each.key}/{each.task_id}" if isinstance(each, TaskRef) else each for each in step.after
    )
    when = "" if step.when == "done" else f" ({step.when})"
    state = "not known" if step.state is None else step.state.value
    return step.name, step.key, state, parents + when, changed, note


@workflow.command()
def cancel(
    name: Id, *, yes: Yes = False, server: ServerUrl = None, as_json: AsJson = False
) -> None:
    """Cancel a workflow: what is blocked or waiting ends as cancelled, and what runs is stopped."""
    if not yes:
        confirm(f"Cancel all steps of the workflow {name}?", as_json=as_json)

    async def act(workflows: QueueWorkflows) -> bool:
        await _found(workflows, name)
        return await workflows.cancel(name)

    cancelled = _with(server, act)
    if as_json:
        print_json({"cancelled": cancelled})
    else:
        console.print("✔ will be cancelled" if cancelled else "the workflow has ended")
