"""Tables in a folder. A reader sees the old or the new version of a table as a whole, even if its writer is killed.

A table is a symbolic link to one of its versions. A new version is written to its own folder, and one rename replaces
the link. The old version is kept until the next write, so that its readers can finish. All Spark workers must see the
folder under the same path: on a local disk, or on a shared file system.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.columns import TRANSITIONS


@contextmanager
def alone(folder: Path, lock: Path, other: str) -> Iterator[None]:
    """Hold a file lock, which the operating system releases even if the process is killed.

    Raises `ConfigurationError` if another process holds the lock. ``other``: what that process does, for the error.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another {other} {folder}: wait until it ends, or choose another folder"
            ) from None
        yield


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file by one rename, so that readers see either the old or the new content, and never a part of it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def first_rows(frame: DataFrame, *order: str, most: int = 1000) -> list[dict[str, Any]]:
    """Return the first rows in the given order. ``-name`` sorts by a column in descending order."""
    columns = [
        frame[name[1:]].desc_nulls_last() if name.startswith("-") else frame[name].asc_nulls_last()
        for name in order
    ]
    frame = frame.orderBy(*columns) if columns else frame
    rows: list[dict[str, Any]] = frame.limit(most).toArrow().to_pylist()
    return rows


_VERSIONS = ".versions"
_GLOB = frozenset("*?[]{}\\")
"""characters that Spark treats as part of a pattern"""
_DAMAGED = "damaged"
_TRANSITIONS = "transitions"


def distinct(transitions: DataFrame) -> DataFrame:
    """Return the transitions without duplicates, which exist, for example, if a folder has a copy of a journal file."""
    # Compare all columns, because transitions with the same number and different content are a fault to report.
    return transitions.dropDuplicates()


class Snapshot(msgspec.Struct, frozen=True):
    """The numbers of rows in the tables of a snapshot."""

    transitions: int
    damaged: int


def folder(path: str | Path) -> Path:
    """Create a folder for tables if necessary, and return its path. Raises `InvalidInput` and `ConfigurationError`."""
    place = Path(path).expanduser().absolute()
    if _GLOB & set(str(place)):
        raise InvalidInput("out", "a path with one of *?[]{}\\", "a path without these characters")
    try:
        (place / _VERSIONS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {place / _VERSIONS} cannot be created: {error.strerror or type(error).__name__}"
        ) from None
    return place


def snapshot(transitions: DataFrame, out: str | Path) -> Snapshot:
    """Write a journal as two tables: ``transitions``, partitioned by date, and ``damaged``.

    The journal is read once, so all commands on a snapshot use the same state of the journal. Raises
    `ConfigurationError` if this process does not see the files of the Spark workers.
    """
    path = folder(out)
    kind = F.when(F.col("event") == _DAMAGED, _DAMAGED).otherwise(_TRANSITIONS)
    split = transitions.select(
        *TRANSITIONS.names, kind.alias("kind"), F.to_date("ts").alias("date")
    )
    with _locked(path):
        staged = _version(path, "staged")
        _writing(split, path, staged, "kind", "date")
        for name in (_DAMAGED, _TRANSITIONS):
            version = _version(path, name)
            part = staged / f"kind={name}"
            if part.exists():
                part.rename(version)
            else:
                version.mkdir()
                pq.write_table(TRANSITIONS.empty_table(), version / "empty.parquet")
            _put(path, name, version)
        _sweep(path)
    return Snapshot(rows(path, _TRANSITIONS), rows(path, _DAMAGED))


def write(table: DataFrame, out: str | Path, name: str) -> DataFrame:
    """Write a new version of a table, and return the table as read back. Raises the errors of `snapshot`."""
    path = folder(out)
    with _locked(path):
        version = _version(path, name)
        _writing(table, path, version)
        _put(path, name, version)
        _sweep(path)
    return read(table.sparkSession, path, name)


def read(spark: SparkSession, out: str | Path, name: str) -> DataFrame:
    """Return a table of a folder. Raises `ConfigurationError` if it does not exist."""
    return spark.read.parquet(_uri(_existing_path(out, name)))


def read_transitions(
    spark: SparkSession,
    out: str | Path,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Return the transitions of a snapshot, or of an archive with the same layout.

    ``since``: earliest included time; ``until``: earliest excluded time. Raises
    `ConfigurationError` if the folder has no transitions.
    """
    schema = from_arrow_schema(TRANSITIONS).add("date", DateType())
    result = spark.read.schema(schema).parquet(_uri(_existing_path(out, _TRANSITIONS)))
    if since is not None:
        result = result.where((F.col("date") >= F.to_date(F.lit(since))) & (F.col("ts") >= since))
    if until is not None:
        result = result.where((F.col("date") <= F.to_date(F.lit(until))) & (F.col("ts") < until))
    return result.select(*TRANSITIONS.names)


def rows(out: str | Path, name: str) -> int:
    """Return the number of rows of a table, from the metadata of its files; 0 if the table does not exist."""
    path = Path(out).expanduser() / name
    return int(ds.dataset(path, format="parquet").count_rows()) if path.is_dir() else 0


def _writing(table: DataFrame, path: Path, version: Path, *by: str) -> None:
    """Write a version, and check that this machine sees all of it, even the parts that other machines have written."""
    observed = Observation()
    result = table.observe(observed, F.count(F.lit(1)).alias("rows"))
    result.write.partitionBy(*by).parquet(_uri(version))
    written, match = observed.get["rows"], rows(version, "")
    if written != match:
        raise ConfigurationError(
            f"rows that Spark wrote: {written:,}; rows that this process finds in {path}: {match:,}; use a folder that "
            "every machine of Spark sees under the same path"
        )


def _existing_path(out: str | Path, name: str) -> Path:
    path = Path(out).expanduser().absolute() / name
    if not path.is_dir():
        raise ConfigurationError(
            f"there is no table named {name} in {path.parent}: create it with `taskqueue pipeline snapshot --out`"
        )
    # Return the current version and not the link, which may change later.
    return path.resolve()


def _version(path: Path, name: str) -> Path:
    return path / _VERSIONS / f"{name}-{secrets.token_hex(6)}"


def _put(path: Path, name: str, version: Path) -> None:
    """Make a version the current one, by one rename of the link."""
    link = path / _VERSIONS / f"{name}.link"
    link.unlink(missing_ok=True)
    link.symlink_to(version.relative_to(path), target_is_directory=True)
    try:
        link.replace(path / name)
    except OSError:
        raise ConfigurationError(
            f"{path / name} is not a table that this program wrote; choose another folder"
        ) from None


def _sweep(place: Path) -> None:
    """Remove all versions of each table except the current and the previous one."""
    current = {path.resolve() for path in place.iterdir() if path.is_symlink()}
    spare: set[str] = set()
    versions = [path for path in (place / _VERSIONS).iterdir() if path.is_dir()]
    for path in sorted(versions, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        name = path.name.rpartition("-")[0]
        if path.resolve() in current:
            continue
        if name in spare or name == "staged" or not (place / name).is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        spare.add(name)


def _locked(path: Path) -> AbstractContextManager[None]:
    return alone(path, path / _VERSIONS / "lock", "process is writing into")


def _uri(path: Path) -> str:
    return f"file://{os.fspath(path)}"
