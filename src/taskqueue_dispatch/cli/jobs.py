"""``taskqueue dispatch submit`` and ``job``."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from taskqueue_cli.commands.publish import payload_of
from taskqueue_cli.commands.status import format_time
from taskqueue_cli.output import AsJson, console, note, print_json
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import DEFAULT_PRIORITY
from taskqueue_dispatch.cli.server import DispatchServer, NotFound, Url, run_request
from taskqueue_remote.problems import problem_of

_TRIES, _PAUSE = 4, 0.25
_LONGEST_WAIT = 30
"""seconds of one request that waits for a job's end"""
_DONE = "done"
_LIVE = {"queued", "running"}
_COLOURS = {"done": "green", "failed": "bold red", "running": "cyan"}


class NoSlotsError(TaskQueueError):
    """A job was not stored: its model has no slots, or no room now."""

    code = "no_slots"


class JobEnded(TaskQueueError):
    """A job has ended otherwise than done."""

    code = "job_ended"


class NotEnded(TaskQueueError):
    """A job has not ended in the time for which it was waited."""

    code = "not_ended"


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    job_id: str
    server: str | None = None
    position: int | None = None
    estimated_wait: float | None = None


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    model: str | None = None
    state: str
    attempt: int
    losses: int
    updated_at: float
    progress: float | str | None = None
    server: str | None = None
    reason: str | None = None
    error: str | None = None


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(submit)
    app.command(name="job")(show)


def submit(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="PAYLOAD|-|@FILE",
            help="Payload as JSON; - reads it from stdin, @FILE from a file. Default: null.",
            show_default=False,
        ),
    ] = None,
    *,
    callback_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL that the result is sent to.", show_default=False),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=9, help="Priority: higher is sent first.")
    ] = DEFAULT_PRIORITY,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the job.", show_default=False)
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            help="Idempotency key: submitting twice with the same key stores one job. Default: random.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Wait up to this many seconds for the job to end, and print its result.",
        ),
    ] = 0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit one job. Exits with 1 where there are no slots, and with --wait unless it is done in time."""
    key = secrets.token_hex(16) if idempotency_key is None else idempotency_key
    given = {"callback_url": callback_url, "tenant": tenant}
    body = {
        "model": model,
        "payload": msgspec.Raw(payload_of(payload)),
        "priority": priority,
        "idempotency_key": key,
        **{name: value for name, value in given.items() if value is not None},
    }

    async def work(server: DispatchServer) -> tuple[_Outcome, _Job | None, Any]:
        outcome = await _submitted(server, body)
        if not wait:
            return outcome, None, None
        if not as_json:
            note(_as_dict(outcome), "dim")
        job, result = await _ended(server, outcome.job_id, wait)
        return outcome, job, result

    outcome, job, result = run_request(url, work)
    if job is None:
        if as_json:
            print_json(outcome)
        else:
            console.print(Text.assemble(("✔ ", "green"), _as_dict(outcome)))
    elif as_json:
        print_json(msgspec.to_builtins(job) | {"outcome": outcome.outcome, "result": result})
    else:
        print_json(result)


async def _submitted(server: DispatchServer, body: dict[str, Any]) -> _Outcome:
    """Submit until it is confirmed. With its key it is stored once, however often it is sent."""
    for tried in range(1, _TRIES + 1):
        try:
            answer = await server.fetch("POST", "/queue/submit", body=body)
            if answer.ok:
                return server.decode(answer.body, _Outcome)
            problem = problem_of(answer.status, answer.body)
            if problem.code == NoSlotsError.code:
                raise NoSlotsError(f"no slots for the job: {problem.detail}")
            raise server.error(answer)
        except BackendUnavailable as error:
            if tried == _TRIES:
                key = body["idempotency_key"]
                raise BackendUnavailable(
                    f"{error}; the job may have been stored: submit it again with --idempotency-key {key}"
                ) from None
            await asyncio.sleep(_PAUSE * tried)
    raise AssertionError  # the last try returns or raises


async def _ended(server: DispatchServer, job_id: str, seconds: float) -> tuple[_Job, Any]:
    """Wait for the end of a job; return it with its result. Raises `JobEnded` and `NotEnded`."""
    until = time.monotonic() + seconds
    while True:
        remaining = max(0.0, until - time.monotonic())
        wait = min(math.ceil(remaining), _LONGEST_WAIT)
        job = await server.ask("GET", _path(job_id), _Job, query={"wait": wait} if wait else None)
        if job.state == _DONE:
            return job, await _result(server, job_id)
        if job.state not in _LIVE:
            why = ": ".join(filter(None, (job.reason, job.error))) or "no reason given"
            raise JobEnded(f"the job {job_id} is {job.state}: {why}")
        if not remaining:
            raise NotEnded(f"the job {job_id} is {job.state} after {seconds:g} s")


async def _result(server: DispatchServer, job_id: str) -> Any:
    try:
        return await server.ask("GET", f"{_path(job_id)}/result", msgspec.Raw)
    except NotFound:  # it was dropped in time
        return None


def show(
    job_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what is known of one job, with its result once it is done. Exits with 1 if nothing is known."""

    async def work(server: DispatchServer) -> tuple[_Job, Any]:
        job = await server.ask("GET", _path(job_id), _Job)
        return job, await _result(server, job_id) if job.state == _DONE else None

    job, result = run_request(url, work)
    if as_json:
        print_json(msgspec.to_builtins(job) | {"result": result})
        return
    rows: dict[str, str | None] = {
        "job": job.job_id,
        "model": job.model,
        "state": job.state,
        "server": job.server,
        "attempt": str(job.attempt),
        "losses": str(job.losses) if job.losses else None,
        "since": format_time(job.updated_at),
        "progress": None if job.progress is None else str(job.progress),
        "reason": job.reason,
        "error": job.error,
        "result": None if result is None else bytes(result).decode(),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            style = _COLOURS.get(value, "") if name == "state" else ""
            table.add_row(Text(name, "dim"), Text(value, style))
    console.print(table)


def _path(job_id: str) -> str:
    check_name("ID", job_id)
    return f"/queue/jobs/{quote(job_id, safe='')}"


def _as_dict(outcome: _Outcome) -> str:
    names = f"{outcome.outcome}  {outcome.job_id}"
    if outcome.server:
        names += f"  on {outcome.server}"
    if outcome.position is not None:
        names += f"  {outcome.position:,} before it"
    if outcome.estimated_wait is not None:
        names += f", about {outcome.estimated_wait:,.1f} s"
    return names
