"""A folder that one process at a time writes into."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskqueue_core.errors import ConfigurationError

__all__ = ["alone"]


@contextmanager
def alone(folder: Path, lock: Path, other: str) -> Iterator[None]:
    """Hold the file ``lock`` against other processes; the system lets go of it when this one ends, however that is.

    Raises `ConfigurationError` where another one holds it. ``other``: what that one is doing, before "folder".
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another {other} {folder}: wait for it, or choose another folder"
            ) from None
        yield
