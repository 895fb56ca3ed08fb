"""Journals that outlive the store that wrote them, so that a job can be looked into afterwards.

The package of a backend offers to keep its own as an entry point of the group ``taskqueue.journals``, under the
backend's name: so the core knows none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from taskqueue_core.errors import ConfigurationError

GROUP = "taskqueue.journals"


class JournalKeeper(Protocol):
    """What such an entry point leads to: a module, or an object, with these functions.

    The file has a line of JSON for each transition, with the fields that the memory backend writes.
    """

    def variables(self, path: Path) -> Mapping[str, str]:
        """Return the environment variables that have the backend write into this file by itself."""

    async def keep_journal(
        self, key: str, path: Path, since: float, store: Mapping[str, str]
    ) -> None:
        """Write what the journal has of a queue into this file, unless the backend did that by itself.

        ``since``: a time (Unix seconds) before which there was nothing. ``store``: environment variables by which
        the backend finds its store, where they are not those of this process.

        Raises `ConfigurationError` and `BackendUnavailable`.
        """


def find_journal_keeper(backend: str) -> JournalKeeper | None:
    """Return who keeps the journal of a backend, named as in the settings; None if nobody does."""
    name = backend.removeprefix("taskqueue_").partition(":")[0]
    for point in entry_points(group=GROUP, name=name):
        return cast("JournalKeeper", point.load())
    return None


def prepare_journal_file(path: Path) -> Path:
    """Make room for a new journal: its folder is there, and no former one. Raises `ConfigurationError`."""
    path = path.expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the journal {path} cannot be written: {error.strerror or type(error).__name__}"
        ) from None
    return path
