"""``taskqueue worker``: run a worker."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from taskqueue_cli.backends import BackendName
from taskqueue_cli.output import (
    AsJson,
    LogLevel,
    argument,
    configure_logging,
    console,
    option,
    print_json,
)
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import BaseWorker, LocalWorker, Worker, load_worker


def run(
    target: Annotated[
        str, argument("Worker to run, for example package.module:worker.", metavar="MODULE:ATTR")
    ],
    *,
    url: Annotated[
        str | None,
        option(
            "URL of the server. Default: as defined by the worker, otherwise TASKQUEUE_SERVER_URL."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        option(
            "Maximum number of tasks that run at the same time. Default: as defined by the worker.",
            min=1,
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Connect directly to the store, without a server.")
    ] = False,
    backend: BackendName = None,
    worker_id: Annotated[
        str | None,
        option(
            "Worker id. Default: as defined by the worker, otherwise host name, process id and a random suffix."
        ),
    ] = None,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Run a worker until Ctrl-C or SIGTERM; a second signal releases the running tasks at once.

    With --local or --backend, the worker connects directly to the store, without a server. A LocalWorker always
    connects directly.

    The exit code is 3 if too many attempts fail in a row, and 4 if the server refuses the worker.
    """
    configure_logging(log_level, load_settings(Settings).log_format)
    worker = _configured(load_worker(target), url, backend, local=local)
    worker.configure(worker_id=worker_id, concurrency=concurrency)
    if not worker.keys:
        raise ConfigurationError(f"{target} has no handlers: register some with @worker.task")
    if as_json:
        print_json({"target": target, "keys": worker.keys, "pid": os.getpid()})
    else:
        keys = ", ".join(worker.keys)
        console.print(f"[green]●[/] worker running for [bold]{keys}[/]  [dim]Ctrl-C stops it")
    worker.run()


def _configured(
    worker: BaseWorker, url: str | None, backend: str | None, *, local: bool
) -> BaseWorker:
    if isinstance(worker, Worker):
        if not local and backend is None:
            worker.configure(url=url)
            return worker
        worker = LocalWorker.of(worker)
    if url is not None:
        raise ConfigurationError(
            "--url cannot be used with a local worker, which connects directly to the store: remove --url"
        )
    if isinstance(worker, LocalWorker):
        worker.configure(backend=backend)
    return worker
