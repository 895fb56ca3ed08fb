"""Stores that a command runs itself, so that a backend works with nothing set up.

The package of a backend offers one as an entry point of the group ``taskqueue.embedded``, under the
backend's name: so the core knows none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import typer.core

from taskqueue_core.errors import ConfigurationError

__all__ = [
    "OPTION",
    "EmbeddedStore",
    "ServeCommand",
    "embedded_store",
    "opened",
    "with_empty_value",
]

GROUP = "taskqueue.embedded"
OPTION = "--embedded-redis"


class EmbeddedStore(Protocol):
    """What such an entry point leads to: a module, or an object, with these functions."""

    def wanted(self) -> bool:
        """Tell whether the backend's settings name no store. Raises `ConfigurationError`."""

    def prepare(self) -> None:
        """Get what it takes to run one, which may be a download. Raises `ConfigurationError`."""

    def run(self, directory: Path) -> AbstractContextManager[Mapping[str, str]]:
        """Run a store with its files in ``directory`` as long as the context is open.

        Gives the environment variables by which the backend finds it; as ``serve --json`` shows them, none is a
        secret. Raises `ConfigurationError`.
        """


class ServeCommand(typer.core.TyperCommand):
    """A command whose option for an embedded store may stand without a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put an empty value where there is none."""
        return super().parse_args(ctx, with_empty_value(args))


def with_empty_value(args: list[str]) -> list[str]:
    """Return the words of a command, where the option for an embedded store has an empty value if it had none."""
    return [
        f"{word}=" if word == OPTION and after.startswith("-") else word
        for word, after in pairwise([*args, "-"])
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
                f"pip install 'taskqueue-backends[{name}]'"
            ) from error
    return None


@contextmanager
def opened(name: str, directory: str) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Run the embedded store of this name, which backends find through the environment.

    Gives its directory, and the environment variables that were set. An empty ``directory`` means one in the
    user's data. Raises `ConfigurationError`.
    """
    store = embedded_store(name)
    if store is None:
        raise ConfigurationError(f"there is no embedded {name} in this installation")
    place = Path(directory).expanduser().absolute() if directory else _data_folder() / name
    with store.run(place) as variables:
        os.environ.update(variables)
        yield place, variables


def _data_folder() -> Path:
    if named := os.environ.get("XDG_DATA_HOME"):
        return Path(named) / "taskqueue"
    usual = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
    return Path.home() / usual / "taskqueue"
