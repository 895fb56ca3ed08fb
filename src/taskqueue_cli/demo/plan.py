"""The plan of a demo run: the files, the tasks that fail once, and the poison task, which always fails."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import Task

POISON_ATTEMPTS = 3
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_FAIL_ONE_IN = 100


class File(msgspec.Struct, frozen=True):
    """A file to process, with its size in bytes and its modification time in nanoseconds when the plan was made."""

    path: str
    size: int
    changed_at: int


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one demo run. Each run has a queue and task ids of its own."""

    key: str
    files: tuple[File, ...]
    failing: frozenset[int]
    """indices of the files whose first attempt fails"""

    @property
    def poison_id(self) -> str:
        """The id of the poison task, whose attempts all fail."""
        return f"{self.key}.poison"

    @property
    def total(self) -> int:
        """The number of tasks: one for each file, plus the poison task."""
        return len(self.files) + 1

    def task_id(self, index: int) -> str:
        """Return the id of the task for the file with this index."""
        return f"{self.key}.{index}"

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks, the poison task first."""
        poison = {"path": "", "poison": True}
        yield Task.of(self.key, poison, id=self.poison_id, max_attempts=POISON_ATTEMPTS)
        for index, file in enumerate(self.files):
            payload: dict[str, object] = {"path": file.path}
            if index in self.failing:
                payload["fails_first"] = True
            yield Task.of(self.key, payload, id=self.task_id(index))


def make_plan(path: Path, limit: int | None) -> DemoPlan:
    """List the files, and choose about one in a hundred, but at least one, whose first attempt fails.

    The choice depends only on the paths, so it is the same in every run. Raises `InvalidInput` if there are no files.
    """
    files = tuple(islice(filter(None, map(file_at, _paths(path.absolute()))), limit))
    if not files:
        allowed = "a file, or a folder that contains files"
        raise InvalidInput("path", "a path without files to process", allowed)
    sums = [zlib.crc32(file.path.encode()) for file in files]
    failing = {index for index, number in enumerate(sums) if number % _FAIL_ONE_IN == 0}
    return DemoPlan(
        key=f"digest-{secrets.token_hex(3)}",
        files=files,
        failing=frozenset(failing or {sums.index(min(sums))}),
    )


def _paths(top: Path) -> Iterator[str]:
    if top.is_file():
        yield str(top)
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            if not name.endswith(".pyc"):
                yield os.path.join(folder, name)  # noqa: PTH118 - os.walk yields strings


def file_at(path: str) -> File | None:
    """Return the file at a path, or None if it is not a regular file or its path cannot be encoded as UTF-8."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        path.encode()
        info = Path(path).lstat()
        if stat.S_ISREG(info.st_mode):
            return File(path, info.st_size, info.st_mtime_ns)
    return None


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``taskqueue demo``."""

    path: Path
    """folder whose files are processed, or one file"""
    backend: str
    """name of the server's backend"""
    embedded: bool = False
    """whether the server starts an embedded store, whose files are deleted at the end of the run"""
    workers: int = 2
    limit: int | None = None
    """maximum number of files to process"""
    journal: Path | None = None
    """file to which the journal of the run is written"""
    keep_going: bool = False
    """whether the server and the workers keep running after the report, until Ctrl-C"""
