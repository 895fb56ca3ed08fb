"""Tables in a folder: each is there whole, as it was before or as it is now, whatever ends the process that writes it.

A table is a link to one version of it. A new version is written beside, then one rename of a link puts it in the
place of the old one, which goes with the next write: so who reads it meanwhile may finish. The folder is one that every
worker of Spark sees under the same path: a disk of this machine, or a file system that they share.
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
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.columns import TRANSITIONS


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


def replace_file(path: Path, data: bytes) -> None:
    """Write a file by one rename, so that readers see the former content or all of the new one."""
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
    """Return the first rows in an order. ``-name`` orders by a column from the highest value."""
    columns = [
        frame[name[1:]].desc_nulls_last() if name.startswith("-") else frame[name].asc_nulls_last()
        for name in order
    ]
    frame = frame.orderBy(*columns) if columns else frame
    rows: list[dict[str, Any]] = frame.limit(most).toArrow().to_pylist()
    return rows


_VERSIONS = ".versions"
_GLOB = frozenset("*?[]{}\\")
"""what Spark would not take for a part of a name"""
_DAMAGED = "damaged"
_TRANSITIONS = "transitions"


class Snapshot(msgspec.Struct, frozen=True):
    """What a snapshot holds, in rows."""

    transitions: int
    damaged: int


def folder(path: str | Path) -> Path:
    """Return a folder for tables, made if need be. Raises `InvalidInput` and `ConfigurationError`."""
    place = Path(path).expanduser().absolute()
    if _GLOB & set(str(place)):
        raise InvalidInput("out", "a path with one of *?[]{}\\", "a path without them")
    try:
        (place / _VERSIONS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {place} cannot be made: {error.strerror or type(error).__name__}"
        ) from None
    return place


def snapshot(transitions: DataFrame, out: str | Path) -> Snapshot:
    """Write a journal, read once: ``transitions`` by date, and apart from them what was ``damaged``.

    Whoever works on a snapshot works on one state of the journal. Doing it again gives the same rows, if nothing has
    happened. Raises `ConfigurationError` where this process does not see what the workers of Spark have written.
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
    """Write a table in the place of its former version, and return it as it is read back. Raises as `snapshot` does."""
    path = folder(out)
    with _locked(path):
        version = _version(path, name)
        _writing(table, path, version)
        _put(path, name, version)
        _sweep(path)
    return read(table.sparkSession, path, name)


def read(spark: SparkSession, out: str | Path, name: str) -> DataFrame:
    """Read a table. Raises `ConfigurationError` where it is not there."""
    return spark.read.parquet(_uri(_existing_path(out, name)))


def read_transitions(
    spark: SparkSession,
    out: str | Path,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Read the transitions of a snapshot, or of an archive with the same layout, some time of them or all.

    ``since`` is within, ``until`` is not. Raises `ConfigurationError` where they are not there.
    """
    result = _journal(spark, _existing_path(out, _TRANSITIONS))
    if since is not None:
        result = result.where((F.col("date") >= F.to_date(F.lit(since))) & (F.col("ts") >= since))
    if until is not None:
        result = result.where((F.col("date") <= F.to_date(F.lit(until))) & (F.col("ts") < until))
    return result.select(*TRANSITIONS.names)


def read_damaged(spark: SparkSession, out: str | Path) -> DataFrame:
    """Read what could not be read of the journal; no rows where no snapshot was written there."""
    if not there(out, _DAMAGED):
        return spark.createDataFrame([], from_arrow_schema(TRANSITIONS))
    return _journal(spark, _existing_path(out, _DAMAGED)).select(*TRANSITIONS.names)


def there(out: str | Path, name: str) -> bool:
    """Tell whether a table is there."""
    return (Path(out).expanduser() / name).is_dir()


def rows(out: str | Path, name: str) -> int:
    """Return how many rows a table has, which its files say without being read."""
    return _rows(Path(out).expanduser() / name)


def _rows(path: Path) -> int:
    return int(ds.dataset(path, format="parquet").count_rows()) if path.is_dir() else 0


def _writing(table: DataFrame, path: Path, version: Path, *by: str) -> None:
    """Write a version, and look that all of it is there: who writes and who reads may be different machines."""
    observed = Observation()
    result = table.observe(observed, F.count(F.lit(1)).alias("rows"))
    result.write.partitionBy(*by).parquet(_uri(version))
    written, match = observed.get["rows"], _rows(version)
    if written != match:
        raise ConfigurationError(
            f"of {written:,} rows that were written {match:,} are in {path}: needed is a folder that every machine "
            "of Spark sees under the same path"
        )


def _journal(spark: SparkSession, path: Path) -> DataFrame:
    schema = from_arrow_schema(TRANSITIONS).add("date", DateType())
    return spark.read.schema(schema).parquet(_uri(path))


def _existing_path(out: str | Path, name: str) -> Path:
    path = Path(out).expanduser().absolute() / name
    if not path.is_dir():
        raise ConfigurationError(
            f"there is no table {name} in {path.parent}: `taskqueue pipeline snapshot --out` makes such a folder"
        )
    return path.resolve()  # the version of now, whatever takes its place meanwhile


def _version(path: Path, name: str) -> Path:
    return path / _VERSIONS / f"{name}-{secrets.token_hex(6)}"


def _put(path: Path, name: str, version: Path) -> None:
    """Have the table be this version, by one rename."""
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
    """Remove what no table is, nor was just before: of each name, all versions but the newest two."""
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
