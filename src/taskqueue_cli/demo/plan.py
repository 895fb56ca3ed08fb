"""What is to be done: which files, which of their tasks fail once, and the poison."""

from __future__ import annotations

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
    """A file as it was when the run began."""

    path: str
    size: int
    changed_at: int

    @property
    def unchanged(self) -> bool:
        """Whether it looks the same now."""
        try:
            info = Path(self.path).lstat()
        except OSError:
            return False
        return (info.st_size, info.st_mtime_ns) == (self.size, self.changed_at)


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run's tasks. Their ids are new with each run."""

    key: str
    files: tuple[File, ...]
    failing: frozenset[int]
    """indices of files whose first attempt fails"""

    @property
    def poison_id(self) -> str:
        """The id of the task that always fails."""
        return f"{self.key}.poison"

    @property
    def total(self) -> int:
        """How many tasks there are: one per file, and the poison."""
        return len(self.files) + 1

    def task_id(self, index: int) -> str:
        """Return the id of a file's task."""
        return f"{self.key}.{index}"

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks, the poison first."""
        yield Task.of(
            self.key,
            {"path": "", "poison": True},
            id=self.poison_id,
            max_attempts=POISON_ATTEMPTS,
        )
        for index, file in enumerate(self.files):
            payload: dict[str, object] = {"path": file.path}
            if index in self.failing:
                payload["fails_first"] = True
            yield Task.of(self.key, payload, id=self.task_id(index))


def make_plan(path: Path, limit: int | None) -> DemoPlan:
    """Look for files. About one in a hundred is to fail once, chosen by its path; at least one is.

    Raises `InvalidInput` where there are none.
    """
    files = tuple(islice(_files(path), limit))
    if not files:
        raise InvalidInput(
            "path", "no readable folder or file", "a file, or a folder that contains files"
        )
    sums = [zlib.crc32(file.path.encode()) for file in files]
    failing = {index for index, number in enumerate(sums) if number % _FAIL_ONE_IN == 0}
    return DemoPlan(
        key=f"digest-{secrets.token_hex(3)}",
        files=files,
        failing=frozenset(failing or {sums.index(min(sums))}),
    )


def _files(path: Path) -> Iterator[File]:
    top = path.absolute()
    if top.is_file():
        yield from _file(str(top))
        return
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(names):
            if not name.endswith(".pyc"):
                yield from _file(os.path.join(folder, name))  # noqa: PTH118 - os.walk gives text


def _file(path: str) -> Iterator[File]:
    """Yield a regular file whose name JSON can express; devices, pipes and links are passed over."""
    try:
        path.encode()
        info = Path(path).lstat()
    except (OSError, UnicodeEncodeError):
        return
    if stat.S_ISREG(info.st_mode):
        yield File(path, info.st_size, info.st_mtime_ns)


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    path: Path
    """a folder, or one file"""
    backend: str
    """the word that the server is given"""
    embedded: bool = False
    """have the server run a store for it, in a folder that is removed at the end"""
    workers: int = 2
    limit: int | None = None
    """the most files to take"""
    journal: Path | None = None
    """keep the journal of the run in this file"""
    keep_going: bool = False
    """leave server and workers running after the report, until interrupted"""
