"""Rows that are not valid tasks, written to Parquet files with the reasons, so that they can be corrected.

A partition writes a hidden file, whose name begins with a dot. The commit of the job renames it, so there is one file
per partition, even if a Spark task was retried. All other hidden files of the job, for example of a Spark task that
was killed, are removed.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from taskqueue_core.errors import ConfigurationError

REASON = "reason"


class RejectedRows:
    """A writer for the rejected rows of one partition. As a context manager, it removes the file after an error."""

    def __init__(self, folder: str | None, job: str) -> None:
        """Create a writer into ``folder``: a path that the driver sees too, or an Arrow URI; ``None``: no output."""
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
            folder = _opened(self._folder)
            folder.base_fs.create_dir(folder.base_path, recursive=True)
            self.name = f".{self._job}-{secrets.token_hex(8)}.parquet"
            self._writer = pq.ParquetWriter(self.name, part.schema, filesystem=folder)
        self._writer.write_batch(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if kind is not None and self._folder is not None and self.name:
            _delete(_opened(self._folder), self.name)


def reveal(folder: str, hidden: str, name: str) -> None:
    """Rename a hidden file, replacing any file that has the new name. Do nothing if it was already renamed."""
    with contextlib.suppress(FileNotFoundError):
        _opened(folder).move(hidden, f"{name}.parquet")


def job_of(hidden: str) -> str:
    """Return the id of the job that wrote a hidden file."""
    return hidden[1:].partition("-")[0]


def sweep(folder: str, job: str) -> None:
    """Remove all hidden files of a job."""
    system = _opened(folder)
    for file in system.get_file_info(fs.FileSelector("", allow_not_found=True)):
        if file.base_name.startswith(f".{job}-"):
            _delete(system, file.base_name)


def _delete(system: fs.FileSystem, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        system.delete_file(name)


def _opened(folder: str) -> fs.SubTreeFileSystem:
    """Return a file system with ``folder`` as its root. Raises `ConfigurationError`."""
    if "://" not in folder:
        return fs.SubTreeFileSystem(folder, fs.LocalFileSystem())
    try:
        system, path = fs.FileSystem.from_uri(folder)
        return fs.SubTreeFileSystem(path, system)
    except (pa.ArrowException, OSError) as error:
        raise ConfigurationError(
            f"option invalidPath: cannot be used ({type(error).__name__}); allowed: a path or a URI that Arrow supports"
        ) from None
