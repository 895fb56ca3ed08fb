"""Rows that are not valid tasks, written to Parquet files with the reasons, so that they can be corrected.

A partition writes a hidden file, whose name begins with a dot. The commit of the job renames it, so there is one file
per partition, even if Spark retried a task. All other hidden files of the job, for example of a killed task, are
removed.
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


class RejectedRows:
    """A writer for the rejected rows of one partition. As a context manager, it removes the file after an error."""

    def __init__(self, folder: str | None, job: str) -> None:
        """Write into ``folder``, a path that the driver sees too, or a URI for Arrow; ``None``: write nothing."""
        self._folder = folder
        self._job = job
        self._writer: pq.ParquetWriter | None = None
        self.name = ""
        """name of the hidden file; empty until the first row is written"""

    def put(self, batch: pa.RecordBatch, rows: list[int], reasons: list[str]) -> None:
        """Write the rows of a batch that ``rows`` lists by index, with their reasons."""
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
    """Rename a hidden file, and replace a file of the new name. Do nothing if it was renamed already."""
    position = _path_of(folder)
    with contextlib.suppress(FileNotFoundError):
        position.system.move(f"{position.path}/{hidden}", f"{position.path}/{name}.parquet")


def job_of(hidden: str) -> str:
    """Return the id of the job that wrote a hidden file."""
    return hidden[1:].partition("-")[0]


def sweep(folder: str, job: str) -> None:
    """Remove all hidden files of a job."""
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
            f"option invalidPath: cannot be used ({type(error).__name__}); allowed: a path or a URI that Arrow supports"
        ) from None
