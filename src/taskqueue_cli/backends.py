"""Embedded stores: a command runs the store itself, so that a backend works with nothing set up.

The package of a backend offers one as an entry point of the group ``taskqueue.embedded``, under the
backend's name, so the core knows none of them.
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

from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, load_plugins
from taskqueue_core.instrumented import InstrumentedBackend

GROUP = "taskqueue.embedded"
EMBEDDED_OPTION = "--embedded-redis"


class EmbeddedStore(Protocol):
    """What such an entry point leads to: a module, or an object, with these functions."""

    def wanted(self) -> bool:
        """Tell whether the backend's settings name no store. Raises `ConfigurationError`."""

    def run(self, directory: Path) -> AbstractContextManager[tuple[str, Mapping[str, str]]]:
        """Run a store with its files in ``directory`` while the context is open.

        Gives its product and version, and the environment variables by which the backend finds it. ``serve
        --json`` prints both, so none is a secret. Raises `ConfigurationError`.
        """


class RunningStore(NamedTuple):
    """An embedded store that runs."""

    name: str
    """product and version, such as ``Valkey 9.1.2``"""
    directory: Path
    variables: Mapping[str, str]
    """the environment variables by which the backend finds it; they are set"""


class ServeCommand(typer.core.TyperCommand):
    """A command whose option for an embedded store needs no directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give the option an empty value if it has none."""
        return super().parse_args(ctx, with_empty_value(args))


def with_empty_value(args: list[str]) -> list[str]:
    """Return the words of a command; the option for an embedded store gets an empty value if it has none."""
    return [
        f"{name}=" if name == EMBEDDED_OPTION and after.startswith("-") else name
        for name, after in pairwise([*args, "-"])
    ]


def embedded_store(backend: str) -> EmbeddedStore | None:
    """Return the store that comes with a backend, named as in the settings; None if it has none."""
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
    """Run the embedded store of a backend, which finds it through the environment.

    An empty ``directory`` means one in the user's data folder. Raises `ConfigurationError`.
    """
    store = embedded_store(backend)
    if store is None:
        raise ConfigurationError(f"there is no embedded {backend} in this installation")
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
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of the server to use, whatever backend is configured. Default: TASKQUEUE_SERVER_URL.",
        show_default=False,
    ),
]


@asynccontextmanager
async def opened(server: str | None) -> AsyncIterator[Backend]:
    """Open the backend that a command is to use, and close it."""
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
    from taskqueue_remote import RemoteBackend  # noqa: PLC0415 - an HTTP client takes its time

    hooks = Hooks()
    load_plugins(hooks, allow=settings.plugins_allow, deny=settings.plugins_deny)
    token = settings.token.get_secret_value() if settings.token else None
    remote = RemoteBackend(server or settings.server_url, token, tls_ca=settings.tls_ca)
    return InstrumentedBackend(remote, hooks)
