"""The command ``taskqueue dispatch demo``."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

import typer

from taskqueue_cli.backends import embedded_store
from taskqueue_cli.output import AsJson, option, paragraphs
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError

_EMBEDDED = "embedded"
"""value of ``--backend`` that selects Redis with an embedded store, even if the settings name another store"""


def add_to(app: typer.Typer) -> None:
    """Add the command ``demo`` to ``app``."""
    app.command(name="demo", help=paragraphs(run.__doc__))(run)


def run(
    *,
    jobs: Annotated[
        int | None, option("Number of jobs. Default: 200.", min=50, max=100_000)
    ] = None,
    seconds: Annotated[
        float | None,
        option("Approximate duration of the run in seconds, instead of --jobs.", min=1, max=3600),
    ] = None,
    backend: Annotated[
        str | None,
        option(
            "Backend for the jobs: a name, a module path or module:attr; 'embedded' starts a private Redis server "
            "for this run. Default: TASKQUEUE_BACKEND.",
            metavar="memory|redis|embedded|NAME",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the jobs and their failures.")] = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the dashboard; 0 selects a free port.")
    ] = 0,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Keep the servers running after the report, until Ctrl-C."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Dispatch jobs of three models to five simulated servers, with injected faults.

    One model returns results in its responses, one is polled for them, and one pushes them. Some jobs fail once, and
    three always fail; some are submitted twice; some have callbacks, one in ten of which is rejected the first time.
    During the run, one server crashes while it runs jobs, and another reports that it is idle while it is busy. At the
    end, the demo checks that every job is accounted for and every result is correct. It exits with 1 if a check fails.
    """
    try:
        from taskqueue_cli.demo_frame.run import (  # noqa: PLC0415 - only this command needs this module
            run_command,
        )
        from taskqueue_dispatch.demo.plan import (  # noqa: PLC0415 - only this command needs this module
            DemoOptions,
            jobs_for,
        )
        from taskqueue_dispatch.demo.run import run_demo  # noqa: PLC0415 - only this command needs this module
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the demo needs the module {error.name!r}, which is not installed; "
            "try: pip install 'taskqueue-backends[dispatch]'"
        ) from error

    if jobs is not None and seconds is not None:
        raise typer.BadParameter("give either --jobs or --seconds, not both", param_hint="--jobs")
    name, embedded = _store(backend or load_settings(Settings).backend)
    options = DemoOptions(
        backend=name,
        embedded=embedded,
        jobs=jobs_for(seconds) if seconds is not None else jobs or DemoOptions(backend="").jobs,
        seed=seed,
        port=port,
        keep_going=keep_going,
    )
    for logger in ("taskqueue", "uvicorn"):
        # Hide log messages, because the demo's own display shows what happens.
        logging.getLogger(logger).addHandler(logging.NullHandler())
    run_command(partial(run_demo, options), as_json=as_json)


def _store(backend: str) -> tuple[str, bool]:
    """Return the name of the backend, and whether it runs on an embedded store."""
    forced = backend == _EMBEDDED
    name = "redis" if forced else backend
    store = embedded_store(name)
    if store is None and forced:
        raise ConfigurationError(
            "no embedded Redis is installed; run: pip install 'taskqueue-backends[embedded]'"
        )
    return name, store is not None and (forced or store.wanted())
