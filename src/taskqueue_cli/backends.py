"""The backend that a command uses, and embedded stores, which a command runs itself.

A backend's package offers an embedded store as an entry point of the group ``taskqueue.embedded`` with the backend's
name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, cast

import typer
import typer.core

from taskqueue_cli.output import option
from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, load_plugins
from taskqueue_core.instrumented import InstrumentedBackend

GROUP = "taskqueue.embedded"
EMBEDDED_OPTION = "--embedded-redis"


class EmbeddedStore(Protocol):
    """The module or object of such an entry point."""

    def wanted(self) -> bool:
        """Return whether the backend's settings name no store. Raises `ConfigurationError`."""

    def run(self, directory: Path) -> AbstractContextManager[tuple[str, Mapping[str, str]]]:
        """Run a store with its files in ``directory`` while the context is open.

        Yield its product and version, and the environment variables by which the backend finds it. They contain
        no secrets, because ``serve --json`` prints them. Raises `ConfigurationError`.
        """


class RunningStore(NamedTuple):
    """A running embedded store."""

    name: str
    """product and version, for example ``Valkey 9.1.2``"""
    directory: Path
    variables: Mapping[str, str]
    """the environment variables by which the backend finds it; they are set in this process"""


class ServeCommand(typer.core.TyperCommand):
    """A command whose option ``--embedded-redis`` can be given without a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add an empty value to the option if it has none."""
        return super().parse_args(ctx, with_empty_value(args))


def with_empty_value(args: list[str]) -> list[str]:
    """Return the arguments of a command, with an empty value for ``--embedded-redis`` if it has none."""
    return [
        f"{name}=" if name == EMBEDDED_OPTION and after.startswith("-") else name
        for name, after in pairwise([*args, "-"])
    ]


def embedded_store(backend: str) -> EmbeddedStore | None:
    """Return the embedded store of a backend, named as in the settings; None if it has none."""
    name = backend.removeprefix("taskqueue_").partition(":")[0]
    for point in entry_points(group=GROUP, name=name):
        try:
            return cast("EmbeddedStore", point.load())
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"an embedded {name} needs the module {error.name!r}: "
                f"pip install 'taskqueue-backends[embedded]'"
            ) from error
    return None


@contextmanager
def run_embedded(backend: str, directory: str) -> Iterator[RunningStore]:
    """Run the embedded store of a backend, and set the environment variables by which the backend finds it.

    An empty ``directory`` means a folder in the user's data folder. Raises `ConfigurationError`.
    """
    store = embedded_store(backend)
    if store is None:
        raise ConfigurationError(
            f"no embedded {backend} is installed: pip install 'taskqueue-backends[embedded]'"
        )
    folder = Path(directory).expanduser().absolute() if directory else _data_folder() / backend
    with store.run(folder) as (name, variables):
        os.environ.update(variables)
        yield RunningStore(name, folder, variables)


def _data_folder() -> Path:
    if data_home := os.environ.get("XDG_DATA_HOME"):
        return Path(data_home) / "taskqueue"
    default = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
    return Path.home() / default / "taskqueue"


BACKEND_HELP = (
    "Uses the configured backend (TASKQUEUE_BACKEND) if several processes can share it, otherwise a running "
    "server: the memory backend, for example, exists only inside the server's process."
)
ServerUrl = Annotated[
    str | None,
    option(
        "URL of the server to use, whatever backend is configured. Default: TASKQUEUE_SERVER_URL.",
        "--server",
        metavar="URL",
    ),
]


@asynccontextmanager
async def opened(server: str | None) -> AsyncIterator[Backend]:
    """Open the backend that a command uses, and close it at the end."""
    backend = await _choose(load_settings(Settings), server)
    try:
        yield backend
    finally:
        await backend.aclose()


async def _choose(settings: Settings, server: str | None) -> Backend:
    if server is None:
        backend = open_backend(settings=settings)
        if backend.capabilities.shared:
            return backend
        await backend.aclose()
    from taskqueue_remote import RemoteBackend  # noqa: PLC0415 - an HTTP client takes long to import

    hooks = Hooks()
    load_plugins(hooks, allow=settings.plugins_allow, deny=settings.plugins_deny)
    token = settings.token.get_secret_value() if settings.token else None
    remote = RemoteBackend(server or settings.server_url, token, tls_ca=settings.tls_ca)
    return InstrumentedBackend(remote, hooks)
