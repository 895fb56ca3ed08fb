"""The commands ``taskqueue dispatch submit`` and ``taskqueue dispatch job``."""

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
from taskqueue_cli.output import AsJson, argument, console, note, option, print_json
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.limits import check_name, escape_controls
from taskqueue_core.tasks import DEFAULT_PRIORITY
from taskqueue_dispatch.cli.server import DispatchServer, Model, NotFound, Url, report, run_request
from taskqueue_dispatch.status import JobStatus

_ATTEMPTS, _RETRY_SECONDS = 4, 0.25
_MAX_WAIT = 30
"""maximum number of seconds for which one request waits for the end of a job"""
_DONE = "done"
_LIVE = {"queued", "running"}
_COLOURS = {"done": "green", "failed": "bold red", "running": "cyan"}


class JobEnded(TaskQueueError):
    """The error of ``submit --wait`` if the job ended without success."""

    code = "job_ended"


class NotEnded(TaskQueueError):
    """The error of ``submit --wait`` if the job did not end in time."""

    code = "not_ended"


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    job_id: str
    server: str | None = None
    position: int | None = None
    estimated_wait: float | None = None


def add_to(app: typer.Typer) -> None:
    """Add the commands ``submit`` and ``job`` to ``app``."""
    app.command()(submit)
    app.command(name="job")(show)


def submit(
    model: Model,
    payload: Annotated[
        str | None,
        argument(
            "JSON text; - reads stdin, @FILE reads a file. Default: null.",
            metavar="PAYLOAD|-|@FILE",
        ),
    ] = None,
    *,
    callback_url: Annotated[
        str | None, option("URL to which the result is sent.", metavar="URL")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(min=0, max=9, help="Priority; jobs with a higher priority are sent first."),
    ] = DEFAULT_PRIORITY,
    tenant: Annotated[str | None, option("Tenant that the job belongs to.")] = None,
    idempotency_key: Annotated[
        str | None,
        option(
            "Idempotency key: submitting again with the same key does not store a second job. Default: random."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds to wait for the job to end; its result is then printed.",
        ),
    ] = 0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit one job. Exits with 1 if the job is refused or, with --wait, if it is not done in time."""
    key = secrets.token_hex(16) if idempotency_key is None else idempotency_key
    optional = {"callback_url": callback_url, "tenant": tenant}
    body = {
        "model": model,
        "payload": msgspec.Raw(payload_of(payload)),
        "priority": priority,
        "idempotency_key": key,
        **{name: value for name, value in optional.items() if value is not None},
    }

    async def work(server: DispatchServer) -> tuple[_Outcome, JobStatus | None, Any]:
        outcome = await _submit(server, body)
        if not wait:
            return outcome, None, None
        if not as_json:
            note(_text_of(outcome), "dim")
        return outcome, *await _wait_for_end(server, outcome.job_id, wait)

    outcome, job, result = run_request(url, work)
    if job is not None:
        fields = msgspec.to_builtins(job) | {"outcome": outcome.outcome, "result": result}
        print_json(fields if as_json else result)
    else:
        report(outcome, _text_of(outcome), as_json=as_json)


async def _submit(server: DispatchServer, body: dict[str, Any]) -> _Outcome:
    """Submit a job. If the server is unavailable, retry up to three times; the idempotency key makes this safe."""
    attempt = 1
    while True:
        try:
            return await server.ask("POST", "/queue/submit", _Outcome, body=body)
        except BackendUnavailable as error:
            if attempt == _ATTEMPTS:
                raise BackendUnavailable(
                    f"{error}; the job may have been stored: submit it again with "
                    f"--idempotency-key {body['idempotency_key']}"
                ) from None
        await asyncio.sleep(_RETRY_SECONDS * attempt)
        attempt += 1


async def _wait_for_end(
    server: DispatchServer, job_id: str, seconds: float
) -> tuple[JobStatus, Any]:
    """Wait until a job has ended. Return its status and its result. Raises `JobEnded` and `NotEnded`."""
    until = time.monotonic() + seconds
    while True:
        remaining = max(0.0, until - time.monotonic())
        wait = min(math.ceil(remaining), _MAX_WAIT)
        job = await server.ask(
            "GET", _path(job_id), JobStatus, query={"wait": wait} if wait else None
        )
        if job.state == _DONE:
            return job, await _result(server, job_id)
        if job.state not in _LIVE:
            why = ": ".join(filter(None, (job.reason, job.error))) or "no reason given"
            raise JobEnded(f"the job {job_id} ended as {job.state}: {why}")
        if not remaining:
            raise NotEnded(f"the job {job_id} is still {job.state} after {seconds:g} s")


async def _result(server: DispatchServer, job_id: str) -> Any:
    try:
        return await server.ask("GET", f"{_path(job_id)}/result", msgspec.Raw)
    except NotFound:  # the result has expired
        return None


def show(
    job_id: Annotated[str, argument("Id of the job.", metavar="ID")],
    *,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of one job, and its result if it is done. Exits with 1 if the job was not found."""

    async def work(server: DispatchServer) -> tuple[JobStatus, Any]:
        job = await server.ask("GET", _path(job_id), JobStatus)
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
            table.add_row(Text(name, "dim"), Text(escape_controls(value, keep="\n"), style))
    console.print(table)


def _path(job_id: str) -> str:
    check_name("ID", job_id)
    return f"/queue/jobs/{quote(job_id, safe='')}"


def _text_of(outcome: _Outcome) -> str:
    text = f"{outcome.outcome}  {outcome.job_id}"
    if outcome.server:
        text += f"  on {outcome.server}"
    if outcome.position is not None:
        text += f"  {outcome.position:,} before it"
    if outcome.estimated_wait is not None:
        text += f", about {outcome.estimated_wait:,.1f} s"
    return text
