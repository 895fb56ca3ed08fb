"""Processing a batch: write it to the archive, update the state, and commit.

All files of a batch are complete before the state is replaced. Replacing the state commits the batch. If the process
ends earlier, Spark repeats the batch. The repeated batch uses the transitions in the archive, if there are any, and has
the same result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow.dataset as ds
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.columns import DAMAGED
from taskqueue_spark.offsets import Offsets
from taskqueue_spark.pipeline.tables import rows
from taskqueue_spark.service import aggregate
from taskqueue_spark.service.alerts import check_windows
from taskqueue_spark.service.balance import probe, resolve
from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import Probe, ServiceState, load, save
from taskqueue_spark.service.update import (
    Alive,
    advance,
    horizon_of,
    note_positions,
    without_old_windows,
)
from taskqueue_spark.service.windows import write_hours


@dataclass(frozen=True)
class Batches:
    """The function that Spark calls with each batch. Its state is in files, so each call may be in another process."""

    options: StreamOptions
    ledgers: Callable[[Sequence[str]], Probe | None] | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Process a batch. A batch that was committed before changes nothing."""
        state, now = load(self.options.state), time.time()
        query = msgspec.json.decode((self.options.checkpoint / "metadata").read_bytes())["id"]
        if number <= state.queries.get(query, -1):
            return
        if query not in state.queries:
            sweep(self.options, state, query)
        batch = aggregate.without_known(batch, state.positions, horizon_of(now))
        if state.queries.keys() - {query}:
            # The checkpoint of an earlier query was lost, so the source may repeat transitions that were already read.
            batch = self._unseen(batch)
        name = _name(query, number)
        self._archive(batch, name)
        state.offsets = ended(self.options.checkpoint / "offsets" / str(number))
        former = state.open
        self._update(batch, name, state, now)
        state.queries[query] = number
        if self.ledgers is not None and state.probe is None and state.books:
            requested = self.ledgers(sorted(state.books))
            if requested is not None:
                probe(state, requested)
        save(self.options.state, state)
        for folder in (self.options.folder / "open").iterdir():
            if folder.name not in {state.open, former}:
                # Keep the previous folder, because it may be in use by readers.
                shutil.rmtree(folder, ignore_errors=True)

    def _unseen(self, batch: DataFrame) -> DataFrame:
        """Return a batch without the damaged entries that the archive already has. Their ``reason`` identifies them."""
        folder = self.options.out / DAMAGED
        if not folder.exists():
            return batch
        archived = batch.sparkSession.read.schema(batch.schema).parquet(str(folder))
        known = F.broadcast(archived.select(F.col("reason").alias("known")).distinct())
        same = (F.col("event") == DAMAGED) & (F.col("reason") == F.col("known"))
        return batch.join(known, same, "left_anti")

    def _archive(self, batch: DataFrame, name: str) -> None:
        """Write the transitions to a temporary folder and rename it, so that readers see all of them or none."""
        paths = {
            "transitions": self.options.archive / f"batch={name}",
            DAMAGED: self.options.out / DAMAGED / f"batch={name}",
        }
        if paths["transitions"].exists():
            # An earlier attempt has already archived the whole batch.
            return
        staging = self.options.folder / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        kind = F.when(F.col("event") == DAMAGED, DAMAGED).otherwise("transitions")
        (
            batch.withColumns({"kind": kind, "date": F.to_date("ts")})
            .write.partitionBy("kind", "date")
            .parquet(str(staging))
        )
        for part in (DAMAGED, "transitions"):
            if (staging / f"kind={part}").exists():
                _move_to(staging / f"kind={part}", paths[part])
        shutil.rmtree(staging, ignore_errors=True)

    def _update(self, batch: DataFrame, name: str, state: ServiceState, now: float) -> None:
        """Update the state with a batch. Its transitions are read from the archive."""
        spark = batch.sparkSession
        archived = self.options.archive / f"batch={name}"
        lines = rows(self.options.out / DAMAGED, f"batch={name}")
        if not archived.exists():
            state.damaged += lines
            resolve(state)
            return
        transitions = spark.read.schema(batch.schema).parquet(str(archived))
        read, beginnings = aggregate.reads(transitions)
        known = self.options.folder / "open" / state.open
        live = (
            spark.read.schema(f"{aggregate.OPEN}, here boolean")
            .parquet(str(known))
            .where("here")
            .drop("here")
            if state.open
            else spark.createDataFrame([], aggregate.OPEN)
        )
        cut = note_positions(state, read, now)
        result = aggregate.steps(transitions, live).persist()
        try:
            opened = self.options.folder / "open" / name
            aggregate.following(result, state.current()).write.mode("overwrite").parquet(
                str(opened)
            )
            counts = aggregate.counted(result, self.options.window, state.probe)
        finally:
            result.unpersist()
        hours = advance(state, counts=counts, alive=_alive(opened), beginnings=beginnings, cut=cut)
        state.open = name
        state.transitions += sum(item.different for item in read)
        state.damaged += lines
        write_hours(self.options.out / "metrics", state.windows, self.options.window, hours)
        check_windows(state, self.options, state.frontier)
        without_old_windows(state, self.options.window, self.options.keep)


def sweep(options: StreamOptions, state: ServiceState, query: str) -> None:
    """Remove a batch that another query archived but did not commit; Spark will not repeat that batch.

    Raises `ConfigurationError` if the archive has more than one batch that the state does not list.
    """
    known = {
        _name(other, number) for other, last in state.queries.items() for number in range(last + 1)
    }
    folders = (options.out / DAMAGED, options.archive)
    unknown = {
        path.name
        for folder in folders
        for path in folder.glob("batch=*")
        if path.name.partition("=")[2] not in known
        and not path.name.startswith(f"batch={query[:8]}")
    }
    if len(unknown) > 1:
        raise ConfigurationError(
            f"{options.archive} has batches that {options.state} does not list ({len(unknown)}); "
            f"restore {options.state} from a backup, or use another folder"
        )
    for name in unknown:
        for folder in folders:
            shutil.rmtree(folder / name, ignore_errors=True)


def ended(path: Path) -> dict[str, int]:
    """Return the positions at which a batch ends, by run and shard; empty if the source's offsets have another form."""
    try:
        value = msgspec.json.decode(path.read_text().splitlines()[-1])
        indexes = Offsets.of(value).plain
        return {
            f"{position['run']}/{shard}": int(position["next"])
            for shard, position in indexes.items()
        }
    except (OSError, IndexError, msgspec.DecodeError, InvalidInput):
        return {}


def _move_to(written: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    written.rename(path)


def _name(query: str, number: int) -> str:
    return f"{query[:8]}-{number:09d}"


def _alive(opened: Path) -> list[Alive]:
    table = ds.dataset(opened, format="parquet").to_table(columns=["key", "state", "here"])
    counts = table.group_by(["key", "state", "here"]).aggregate([([], "count_all")])
    return [
        Alive(row["key"], row["state"], row["here"], row["count_all"]) for row in counts.to_pylist()
    ]
