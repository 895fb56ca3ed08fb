"""A GPU server with several models. It runs every job that it gets, at once and as often as it gets it.

It has no idempotency keys and no limit, so each mistake of a dispatcher becomes a run in its log. The file
``gpu-<number>.mode`` says what it does wrong at the moment:

========= ==============================================================================================
busy      new jobs get 503
error     new jobs get 500 and do not run
gateway   new jobs run, and their requests get 502 at once, as from a proxy that has lost patience
drop      new jobs run, and their connections are closed without an answer
late      answers with results come half a second after the end of the job
hang      polls and health checks get no answer
garble    polls and health checks get half of a JSON object
foreign   polls get the state of another job
stale     polls say that an ended job still runs
========= ==============================================================================================
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from taskqueue_dispatch.gpu_server.component import Receive, Scope, Send, respond
from taskqueue_dispatch.gpu_server.simulator import LocalServer
from taskqueue_dispatch.names import queue_of
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

_LATE = 0.5
_HUGE = b'{"status":"success","result":"' + b"x" * 400_000 + b'"}'
_OTHER = "0123456789-" + "0" * 32
"""an id as dispatchers form it, of no job"""
_OUTCOMES = {"fail": "failed", "refuse": "refused", "huge": "unusable", "foreign": "unusable"}


class _Run:
    """One run of a job."""

    def __init__(self, job: str, body: dict[str, Any]) -> None:
        self.job = job
        self.body = body
        self.outcome = ""
        self.work: asyncio.Task[None]


class Gpu:
    """The ASGI application."""

    def __init__(self, setup: Setup, log: Log) -> None:
        self._name = f"gpu-{setup.number}"
        self._lists = setup.number != 0
        """whether health reports list the jobs, and do not only count them"""
        self._log = log
        self._mode = Path(setup.log).parent / f"{self._name}.mode"
        self._runs: dict[tuple[str, str], _Run] = {}
        """the latest run of each job, by model and id"""
        self._active: dict[_Run, str] = {}

    @property
    def mode(self) -> str:
        """What the server does wrong at the moment."""
        return self._mode.read_text() if self._mode.exists() else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        _, model, word, *rest = scope["path"].split("/")
        if scope["method"] == "POST":
            await self._post(model, scope, receive, send)
            return
        mode = self.mode
        if mode == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
        elif mode == "garble":
            await respond(send, 200, b'{"status":"succ')
        elif word == "health":
            jobs = [run.job for run, of in self._active.items() if of == model]
            fields = {"active_jobs": len(jobs)} | ({"jobs": jobs} if self._lists else {})
            await respond(send, 200, msgspec.json.encode(fields))
        else:
            await self._status(scope["method"], self._runs.get((model, unquote(rest[0]))), send)

    async def _status(self, method: str, run: _Run | None, send: Send) -> None:
        if self.mode == "foreign":
            await respond(send, 200, msgspec.json.encode({"status": "success", "job_id": _OTHER}))
        elif run is None:
            await respond(send, 404, b"{}")
        else:
            if method == "DELETE" and run.body["will"] != "stubborn":
                # Let the task begin: it would otherwise not note its end, and run for ever according to reports.
                await asyncio.sleep(0)
                run.work.cancel()
                await asyncio.wait([run.work])
            if self.mode == "stale":
                run = _Run(run.job, run.body)
            await respond(send, 200, self._answer(run))

    async def _post(self, model: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        mode = self.mode
        if mode in {"busy", "error"}:
            await respond(send, 503 if mode == "busy" else 500, b"{}")
            return
        run = _Run(headers[b"x-job-id"].decode(), msgspec.json.decode(body))
        self._runs[model, run.job] = run
        self._active[run] = model
        call = self._log.next_call()
        told = {"call": call, "key": queue_of(model), "task": run.job}
        self._log.note(What.RUN, name=f"{model}-{self._name}", **told)
        run.work = asyncio.create_task(self._work(run, told))
        if mode == "gateway":
            await respond(send, 502, b"{}")
        elif mode == "drop":
            head = {"type": "http.response.start", "status": 200}
            await send(head | {"headers": [(b"content-length", b"9")]})
        elif model == "polled":
            await respond(send, 200, self._answer(run))
        else:
            await asyncio.wait([run.work])
            await asyncio.sleep(_LATE if mode == "late" else 0)
            refused = {"failed": 500, "refused": 422, "cancelled": 500}
            await respond(send, refused.get(run.outcome, 200), self._answer(run))

    async def _work(self, run: _Run, told: dict[str, Any]) -> None:
        run_ends = "cancelled"
        try:
            await asyncio.sleep(run.body["seconds"])
            run_ends = _OUTCOMES.get(run.body["will"], "success")
        finally:
            run.outcome = run_ends
            self._log.note(What.RAN, outcome=run_ends, **told)
            del self._active[run]

    def _answer(self, run: _Run) -> bytes:
        fields: dict[str, Any] = {"status": "processing", "job_id": run.job}
        if run.outcome:
            if run.body["will"] == "huge":
                return _HUGE
            if run.body["will"] == "foreign":
                fields["job_id"] = _OTHER
            if run.outcome in {"success", "unusable"}:
                fields |= {"status": "success", "result": {"job": run.job}}
            else:
                final = run.outcome == "refused"
                fields |= {"status": "failed", "error": run.outcome, "final": final}
        return msgspec.json.encode(fields)


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Serve until SIGTERM."""
    logging.disable()
    server = LocalServer(Gpu(setup, log))
    await server.listen(setup.port)
    log.note(What.PHASE, name="serving")
    await over.wait()
    server.cut()
    await server.wait_closed()
