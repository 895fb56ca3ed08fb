"""``taskqueue dispatch demo``."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

import typer

from taskqueue_cli.backends import embedded_store
from taskqueue_cli.output import AsJson, paragraphs
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError

_EMBEDDED = "embedded"
"""the word for Redis with a store of its own for the run, whatever the settings name"""


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="demo", help=paragraphs(run.__doc__))(run)


def run(
    *,
    jobs: Annotated[
        int | None,
        typer.Option(min=50, max=100_000, help="Number of jobs. Default: 200.", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=3600,
            help="Approximate duration of the run, instead of --jobs.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="memory|redis|embedded|WORD",
            help="Backend for the jobs: a name, a module path or module:attr; embedded starts a "
            "Redis server for this run. TASKQUEUE_BACKEND.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the jobs and the faults.")] = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the dashboard; 0 selects a free port.")
    ] = 0,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Keep everything running afterwards, until Ctrl-C."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Dispatch jobs of three models to five simulated servers, with failures on purpose.

    One model answers at once, one is asked for its results, one pushes them. Some jobs fail once, three always;
    some are submitted twice; some are told to a receiver of callbacks, which refuses a few at first. Midway one
    server crashes with jobs in hand, and another says that it is idle while it is not. At the end every job must
    be accounted for, and every result equal a direct computation; else it exits with 1.
    """
    try:
        from taskqueue_cli.demo_frame.run import (  # noqa: PLC0415 - no other command needs it
            run_command,
        )
        from taskqueue_dispatch.demo import DemoOptions, run_demo  # noqa: PLC0415 - as above
        from taskqueue_dispatch.demo.plan import jobs_for  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the demo needs the module {error.name!r}, which is not installed; "
            "try: pip install 'taskqueue-backends[dispatch]'"
        ) from error

    if jobs is not None and seconds is not None:
        raise typer.BadParameter("either --jobs or --seconds", param_hint="--jobs")
    token, embedded = _store(backend or load_settings(Settings).backend)
    options = DemoOptions(
        backend=token,
        embedded=embedded,
        jobs=jobs_for(seconds) if seconds is not None else jobs or DemoOptions(backend="").jobs,
        seed=seed,
        port=port,
        keep_going=keep_going,
    )
    for name in ("taskqueue", "uvicorn"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # the view tells what happens
    run_command(partial(run_demo, options), as_json=as_json)


def _store(token: str) -> tuple[str, bool]:
    """Return the word of the backend, and whether it gets a store of its own."""
    own = token == _EMBEDDED
    name = "redis" if own else token
    store = embedded_store(name)
    if store is None:
        if own:
            raise ConfigurationError("there is no embedded redis in this installation")
        return name, False
    return name, own or store.wanted()
