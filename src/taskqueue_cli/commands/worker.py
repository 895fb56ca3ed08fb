"""``taskqueue worker``: run a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.markup import escape

from taskqueue_cli.backends import BackendName
from taskqueue_cli.output import (
    AsJson,
    LogFormat,
    LogFormatOption,
    LogLevelOption,
    argument,
    configure_logging,
    console,
    option,
    print_json,
)
from taskqueue_cli.worker_board import BEAT_SECONDS, Board, HealthFile
from taskqueue_cli.worker_processes import WorkerProcesses, reporting_to_parent
from taskqueue_core.concurrency import first_completed
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.loading import load_backend
from taskqueue_worker import BaseWorker, LocalWorker, Worker, load_worker
from taskqueue_worker.process_end import run_process
from taskqueue_worker.report import WorkerReport

T = TypeVar("T")


def run(
    target: Annotated[
        str, argument("Worker to run, for example package.module:worker.", metavar="MODULE:ATTR")
    ],
    *,
    url: Annotated[
        str | None,
        option(
            "URL of the server. Default: as defined by the worker, otherwise TASKQUEUE_SERVER_URL.",
            "--url",
            "--server",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        option(
            "Maximum number of tasks that run at the same time. Default: as defined by the worker.",
            min=1,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        option("Task to work for, instead of all. May be repeated.", metavar="NAME"),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Connect directly to the store, without a server.")
    ] = False,
    backend: BackendName = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="First write the policies of the tasks into the settings of their queues, for development. In a "
            "deployment, use `taskqueue apply`.",
        ),
    ] = False,
    worker_id: Annotated[
        str | None,
        option(
            "Worker id. Default: as defined by the worker, otherwise host name, process id and a random suffix. "
            "With several processes, each adds a number."
        ),
    ] = None,
    processes: Annotated[
        int,
        option(
            "Number of worker processes, each with the whole concurrency. Default: 1.",
            min=1,
            max=64,
        ),
    ] = 1,
    tasks_per_child: Annotated[
        int | None,
        option(
            "Number of tasks after which a child process, of tasks with run='process', is replaced.",
            min=1,
        ),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Replace the worker when a Python file in the current folder changes. Needs the extra dev.",
        ),
    ] = False,
    health: Annotated[
        str | None,
        option(
            "Address of an HTTP server with /alive, /ready and /metrics, such as 127.0.0.1:8421.",
            metavar="HOST:PORT",
        ),
    ] = None,
    health_file: Annotated[
        Path | None,
        option("File that is touched every second as long as the worker is alive.", metavar="PATH"),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    as_json: AsJson = False,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a worker until Ctrl-C or SIGTERM; a second signal releases the running tasks at once.

    With --local or --backend, the worker connects directly to the store, without a server. A LocalWorker always
    connects directly.

    Prints the keys once the server has welcomed the worker, or the store has answered; with --json, one object with
    target, keys and pid.

    The exit code is 3 if too many attempts fail in a row, and 4 if the server refuses the worker.
    """
    file = None if health_file is None else HealthFile(health_file)
    board = Board(processes)
    with contextlib.ExitStack() as stack:
        shown: dict[str, Any] = {"target": target, "pid": os.getpid()}
        if health is not None:
            from taskqueue_cli.worker_health import HealthServer  # noqa: PLC0415 - slow to import

            server = HealthServer(health, board)
            stack.callback(server.close)
            shown["health"] = server.url

        def ready(report: WorkerReport) -> None:
            if as_json:
                print_json(shown | {"keys": report.keys, "processes": processes})
                return
            keys = escape(", ".join(report.keys))
            several = f" in {processes} processes" if processes > 1 else ""
            console.print(f"[green]●[/] working for [bold]{keys}[/]{several}  [dim]Ctrl-C stops it")
            if health is not None:
                console.print(f"  health at {shown['health']}", soft_wrap=True)

        if processes == 1 and not reload:
            set_up = partial(_set_up_logs, log_level, log_format)
            worker = _loaded(target, url, backend, local=local, set_up_logs=set_up)
            worker.configure(
                worker_id=worker_id,
                concurrency=concurrency,
                only=only,
                apply=apply or None,
                tasks_per_child=tasks_per_child,
            )
            if not worker.keys:
                raise ConfigurationError(
                    f"{target} has no handlers: register some with @worker.task"
                )
            if not as_json and parent is None:
                console.print(f"[yellow]○[/] connecting to {escape(worker.source)}", soft_wrap=True)
            run_process(_serve(worker, board, file, ready, parent))
            return
        if local or backend is not None:
            _demand_shared(backend or load_settings(Settings).backend)
        _set_up_logs(log_level, log_format)
        words = _words(target, url=url, concurrency=concurrency, only=only, local=local)
        words += _words(apply=apply, backend=backend, log_level=log_level, log_format=log_format)
        words += _words(tasks_per_child=tasks_per_child)
        supervisor = WorkerProcesses(
            words,
            processes,
            board,
            on_ready=ready,
            worker_id=worker_id,
            reload=Path.cwd() if reload else None,
        )
        if code := asyncio.run(_with_beats(supervisor.run(), partial(_touch, board, file))):
            raise typer.Exit(code)


def _demand_shared(backend: str) -> None:
    if not load_backend(backend).capabilities.shared:
        raise ConfigurationError(
            f"--processes and --reload need a store that processes share, but each has a {backend!r} backend of "
            "its own: run 'taskqueue serve', and the worker without --local and --backend"
        )


def _set_up_logs(level: str | None, form: LogFormat | None) -> None:
    """Write the logs of all loggers to stderr, as the options or else the settings say."""
    settings = load_settings(Settings)
    configure_logging(level or settings.log_level, form or settings.log_format, everything=True)


def _words(*words: str, **options: str | int | bool | list[str] | None) -> list[str]:
    """Return the arguments of the command line for these options."""
    found = [*words]
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(word)
        elif value not in (None, False):
            for each in value if isinstance(value, list) else [value]:
                found += [word, str(each)]
    return found


def _touch(board: Board, file: HealthFile | None) -> None:
    if file is not None and board.alive():
        file.touch()


async def _with_beats(work: Coroutine[Any, Any, T], beat: Callable[[], None]) -> T:
    """Await ``work``, and call ``beat`` every `BEAT_SECONDS` until it ends."""

    async def beats() -> NoReturn:
        while True:
            beat()
            await asyncio.sleep(BEAT_SECONDS)

    return await first_completed(work, beats())


async def _serve(
    worker: BaseWorker,
    board: Board,
    file: HealthFile | None,
    ready: Callable[[WorkerReport], None],
    parent: int | None,
) -> None:
    """Run a worker; ``parent`` is the file descriptor through which it reports to a supervisor, if it has one."""
    async with contextlib.AsyncExitStack() as stack:
        send = None
        if parent is not None:
            send = await stack.enter_async_context(reporting_to_parent(parent, worker))

        def beat() -> None:
            if send is not None:
                send(worker.report())
                return
            board.put(0, worker.report())
            _touch(board, file)

        def on_ready() -> None:
            beat()
            if send is None:
                ready(worker.report())

        await _with_beats(worker.serve(on_ready=on_ready, signals=True), beat)


def _loaded(
    target: str,
    url: str | None,
    backend: str | None,
    *,
    local: bool,
    set_up_logs: Callable[[], None],
) -> BaseWorker:
    worker = load_worker(target)
    set_up_logs()  # if the application has configured logging when it was imported, that stays
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
