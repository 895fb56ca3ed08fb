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

__all__ = ["REASON", "Aside", "job_of", "reveal", "sweep"]

REASON = "reason"


class _Place(NamedTuple):
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
        some = batch.take(pa.array(rows, pa.int64()))
        some = some.append_column(REASON, pa.array(reasons, pa.string()))
        if self._writer is None:
            place = _place(self._folder)
            place.system.create_dir(place.path, recursive=True)
            self.name = f".{self._job}-{secrets.token_hex(8)}.parquet"
            path = f"{place.path}/{self.name}"
            self._writer = pq.ParquetWriter(path, some.schema, filesystem=place.system)
        self._writer.write_batch(some)

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
            _delete(_place(self._folder), self.name)


def reveal(folder: str, hidden: str, name: str) -> None:
    """Give a hidden file its name, in place of one that has it. One that is revealed already is left alone."""
    place = _place(folder)
    with contextlib.suppress(FileNotFoundError):
        place.system.move(f"{place.path}/{hidden}", f"{place.path}/{name}.parquet")


def job_of(hidden: str) -> str:
    """Return the job that wrote a hidden file."""
    return hidden[1:].partition("-")[0]


def sweep(folder: str, job: str) -> None:
    """Remove all that a job wrote and nobody revealed."""
    place = _place(folder)
    for file in place.system.get_file_info(fs.FileSelector(place.path, allow_not_found=True)):
        if file.base_name.startswith(f".{job}-"):
            _delete(place, file.base_name)


def _delete(place: _Place, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        place.system.delete_file(f"{place.path}/{name}")


def _place(folder: str) -> _Place:
    if "://" not in folder:
        return _Place(fs.LocalFileSystem(), folder.rstrip("/"))
    try:
        return _Place(*fs.FileSystem.from_uri(folder))
    except (pa.ArrowException, OSError) as error:
        raise ConfigurationError(
            f"option invalidPath: cannot be used ({type(error).__name__}); allowed: a path or a URI that Arrow knows"
        ) from None
