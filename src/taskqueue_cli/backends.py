"""The backend that a command uses, and what its package offers for commands: an embedded store, a journal keeper.

They are entry points of the groups ``taskqueue.embedded`` and ``taskqueue.journals``, with the backend's name.
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

EMBEDDED_GROUP = "taskqueue.embedded"
JOURNALS_GROUP = "taskqueue.journals"
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


class JournalKeeper(Protocol):
    """Saves the journal of a queue to a file that outlives the store: a module, or an object, with these functions.

    The file has one line of JSON for each state change, with the fields that the memory backend writes.
    """

    def variables(self, path: Path) -> Mapping[str, str]:
        """Return the environment variables with which the backend writes the file itself."""

    async def keep_journal(
        self, key: str, path: Path, since: float, store: Mapping[str, str]
    ) -> None:
        """Write the journal of a queue to the file, unless the backend has written it itself.

        ``since`` is a time (Unix seconds) before the first entry. ``store``: environment variables by which
        the backend finds its store, where they differ from those of this process.

        Raises `ConfigurationError` and `BackendUnavailable`.
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
    try:
        return cast("EmbeddedStore | None", _load(EMBEDDED_GROUP, backend))
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"an embedded {backend} needs the module {error.name!r}: "
            f"pip install 'taskqueue-backends[embedded]'"
        ) from error


def find_journal_keeper(backend: str) -> JournalKeeper | None:
    """Return the journal keeper of a backend, named as in the settings; None if it has none."""
    return cast("JournalKeeper | None", _load(JOURNALS_GROUP, backend))


def _load(group: str, backend: str) -> object:
    name = backend.removeprefix("taskqueue_").partition(":")[0]
    point = next(iter(entry_points(group=group, name=name)), None)
    return None if point is None else point.load()


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
