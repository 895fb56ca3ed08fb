"""Rows that are no tasks, put aside as Parquet with the reason of each, so that somebody can mend them.

A partition writes a file that readers do not see (its name begins with a dot); the commit of the job gives it its
name, so there is one file per partition whatever failed and was tried again in between. What else the job wrote, as by
a task that was killed or a copy that was slower, is removed.
"""

from __future__ import annotations

import contextlib
import secrets
from types import TracebackType
from typing import NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from taskqueue_core.errors import ConfigurationError

REASON = "reason"


class _RejectedPath(NamedTuple):
    system: fs.FileSystem
    path: str


class Aside:
    """Writes the rows of one partition. A context manager: where it fails, nothing stays behind."""

    def __init__(self, folder: str | None, job: str) -> None:
        """Write into ``folder``: a path that the driver sees too, or a URI that Arrow knows; ``None``: nowhere."""
        self._folder = folder
        self._job = job
        self._writer: pq.ParquetWriter | None = None
        self.name = ""
        """of the hidden file; nothing where there is none"""

    def put(self, batch: pa.RecordBatch, rows: list[int], reasons: list[str]) -> None:
        """Keep some rows of a batch."""
        if self._folder is None or not rows:
            return
        part = batch.take(pa.array(rows, pa.int64()))
        part = part.append_column(REASON, pa.array(reasons, pa.string()))
        if self._writer is None:
            position = _path_of(self._folder)
            position.system.create_dir(position.path, recursive=True)
            self.name = f".{self._job}-{secrets.token_hex(8)}.parquet"
            path = f"{position.path}/{self.name}"
            self._writer = pq.ParquetWriter(path, part.schema, filesystem=position.system)
        self._writer.write_batch(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if error is not None and self._folder is not None and self.name:
            _delete(_path_of(self._folder), self.name)


def reveal(folder: str, hidden: str, name: str) -> None:
    """Give a hidden file its name, in place of one that has it. One that is revealed already is left alone."""
    position = _path_of(folder)
    with contextlib.suppress(FileNotFoundError):
        position.system.move(f"{position.path}/{hidden}", f"{position.path}/{name}.parquet")


def job_of(hidden: str) -> str:
    """Return the job that wrote a hidden file."""
    return hidden[1:].partition("-")[0]


def sweep(folder: str, job: str) -> None:
    """Remove all that a job wrote and nobody revealed."""
    position = _path_of(folder)
    for file in position.system.get_file_info(fs.FileSelector(position.path, allow_not_found=True)):
        if file.base_name.startswith(f".{job}-"):
            _delete(position, file.base_name)


def _delete(position: _RejectedPath, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        position.system.delete_file(f"{position.path}/{name}")


def _path_of(folder: str) -> _RejectedPath:
    if "://" not in folder:
        return _RejectedPath(fs.LocalFileSystem(), folder.rstrip("/"))
    try:
        return _RejectedPath(*fs.FileSystem.from_uri(folder))
    except (pa.ArrowException, OSError) as error:
        raise ConfigurationError(
            f"option invalidPath: cannot be used ({type(error).__name__}); allowed: a path or a URI that Arrow knows"
        ) from None
