"""Selection of the backend that a command uses, and loading of a backend's embedded store and journal keeper.

A package registers its store and its journal keeper as entry points of the groups ``taskqueue.embedded`` and
``taskqueue.journals``, under the name of its backend.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from getpass import getuser
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, cast

import typer
import typer.core

from taskqueue_cli.output import note, option
from taskqueue_core.assembly import open_backend
from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import AuditEntry, audit_of, has
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, TaskQueueError
from taskqueue_core.hooks import Hooks, load_plugins
from taskqueue_core.instrumented import InstrumentedBackend

T = TypeVar("T")
EMBEDDED_GROUP = "taskqueue.embedded"
JOURNALS_GROUP = "taskqueue.journals"
EMBEDDED_OPTION = "--embedded-redis"
_BACKEND = "TASKQUEUE_BACKEND"
PROBE_AFTER = 0.5
"""seconds after which a command that still waits checks whether its store is available"""
PROBE_SECONDS = 0.8
"""seconds that this check may take"""


class EmbeddedStore(Protocol):
    """A store for one backend, which a command can start for its own use."""

    def wanted(self) -> bool:
        """Return True if a command should start a store, because the backend's settings name none.

        Raises `ConfigurationError`.
        """

    def run(self, directory: Path) -> AbstractContextManager[tuple[str, Mapping[str, str]]]:
        """Run a store with its files in ``directory`` while the context is open.

        Yield the store's product and version, and the environment variables that tell the backend where the store is.
        The variables must not contain secrets, because ``serve --json`` prints them. Raises `ConfigurationError`.
        """


class JournalKeeper(Protocol):
    """A module or object that saves the journal of a queue to a file, to keep the journal after the store is deleted.

    The file has one line of JSON for each change of state, in the format of the memory backend.
    """

    def variables(self, path: Path) -> Mapping[str, str]:
        """Return environment variables that make the server's backend write the file; empty if it cannot."""

    async def keep_journal(
        self, key: str, path: Path, since: float, store: Mapping[str, str]
    ) -> None:
        """Write the journal of a queue to the file, unless the server's backend has already written it.

        ``since`` is a time in Unix seconds before the first record. ``store`` contains the environment variables of
        an embedded store, which override those of this process.

        Raises `ConfigurationError` and `BackendUnavailable`.
        """


class RunningStore(NamedTuple):
    """A running embedded store."""

    name: str
    """product and version, for example ``Valkey 9.1.2``"""
    directory: Path
    variables: Mapping[str, str]
    """environment variables that tell the backend where the store is; they are set in this process"""


class ServeCommand(typer.core.TyperCommand):
    """A command whose option ``--embedded-redis`` can be given without a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after adding an empty value to ``--embedded-redis`` if it has none."""
        return super().parse_args(ctx, with_empty_value(args))


def with_empty_value(args: list[str]) -> list[str]:
    """Return command-line arguments in which a bare ``--embedded-redis`` is replaced by ``--embedded-redis=``."""
    return [
        f"{name}=" if name == EMBEDDED_OPTION and after.startswith("-") else name
        for name, after in pairwise([*args, "-"])
    ]


def embedded_store(backend: str) -> EmbeddedStore | None:
    """Return the embedded store that is installed for the named backend, or None."""
    try:
        return cast("EmbeddedStore | None", _load(EMBEDDED_GROUP, backend))
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"an embedded {backend} needs the module {error.name!r}: "
            f"run pip install 'taskqueue-backends[embedded]'"
        ) from error


def find_journal_keeper(backend: str) -> JournalKeeper | None:
    """Return the journal keeper that is installed for the named backend, or None."""
    return cast("JournalKeeper | None", _load(JOURNALS_GROUP, backend))


def _load(group: str, backend: str) -> object:
    name = backend.removeprefix("taskqueue_").partition(":")[0]
    point = next(iter(entry_points(group=group, name=name)), None)
    return None if point is None else point.load()


@contextmanager
def run_embedded(backend: str, directory: str) -> Iterator[RunningStore]:
    """Run the embedded store of the named backend, and set environment variables with which the backend finds it.

    An empty ``directory`` means a folder in the user's data folder. Raises `ConfigurationError`.
    """
    store = embedded_store(backend)
    if store is None:
        raise ConfigurationError(
            f"no embedded {backend} is installed: run pip install 'taskqueue-backends[embedded]'"
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
    "Uses the configured backend (TASKQUEUE_BACKEND) if several processes can share it, otherwise a running server "
    "(TASKQUEUE_SERVER_URL). For example, the memory backend exists only inside the server's process."
)
BackendName = Annotated[
    str | None,
    option(
        "Backend to use: its name, its module, or module:attr. Default: TASKQUEUE_BACKEND.",
        metavar="BACKEND",
    ),
]
ServerUrl = Annotated[
    str | None,
    option(
        "Use the server at this URL, even if another backend is configured.",
        "--server",
        metavar="URL",
    ),
]


def with_backend(server: str | None, act: Callable[[Backend], Awaitable[T]]) -> T:
    """Call ``act`` with the backend of a command, close the backend, and return the result.

    ``server`` is the URL given by --server.
    """

    async def run() -> T:
        settings = load_settings(Settings)
        backend, setting = await _choose(settings, server)
        try:
            return await _within_outage_limit(backend, act(backend))
        except BackendUnavailable as error:
            named = "" if setting in str(error) else f"; the address is from {setting}"
            raise BackendUnavailable(f"{error}{named}") from error
        finally:
            await backend.aclose()

    return asyncio.run(run())


async def record_action(
    backend: Backend, action: str, key: str, *, tasks: int | None = None, details: str = ""
) -> None:
    """Add an action of this command to the audit log of the store, unless a server has recorded it.

    It is carried out whatever the store says, so a failure is only a warning.
    """
    if has(backend, Capability.AUDIT):
        actor = f"{getuser()}@{gethostname()}"
        entry = AuditEntry(actor=actor, action=action, key=key, tasks=tasks, details=details)
        try:
            await audit_of(backend).record(entry)
        except TaskQueueError as error:
            note(f"the action {action!r} is not in the audit log: {error}", "yellow")


async def _within_outage_limit(backend: Backend, call: Awaitable[T]) -> T:
    """Wait for ``call``. If it takes long and the store is unavailable, raise `BackendUnavailable` within 2 s.

    The backend itself retries for longer, because a worker should survive an outage. A person should not wait for it.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait([task], timeout=PROBE_AFTER)
        while not done:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    health = await backend.health()
            except TimeoutError:
                health = None
            done, _ = await asyncio.wait([task], timeout=0 if health is None else PROBE_AFTER)
            if not done and (health is None or not health.ok):
                raise BackendUnavailable("the store or the server does not respond")
        return await task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _choose(settings: Settings, server: str | None) -> tuple[Backend, str]:
    """Return the backend of a command, and the name of the setting or option that contains its address."""
    if server is None:
        backend = open_backend(settings=settings)
        if backend.capabilities.shared:
            name = settings.backend.partition(":")[0].removeprefix("taskqueue_")
            return backend, f"TASKQUEUE_{name.upper()}_URL" if name.isidentifier() else _BACKEND
        await backend.aclose()
    from taskqueue_remote import create_backend  # noqa: PLC0415 - the HTTP client is slow to import

    hooks = Hooks()
    load_plugins(hooks, allow=settings.plugins_allow, deny=settings.plugins_deny)
    setting = "TASKQUEUE_SERVER_URL" if server is None else "--server"
    return InstrumentedBackend(create_backend(server), hooks), setting
