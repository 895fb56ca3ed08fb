"""A batch: archived, folded into what is known, committed.

Everything that a batch leaves is in its place before the state is replaced, which is the one step that commits
it. A batch that is given again, because a process ended in between, finds its transitions archived and comes to the
same from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.dataset as ds
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls them

from taskqueue_spark.service import folding
from taskqueue_spark.service.advancing import Alive, advance, without_old_windows
from taskqueue_spark.service.balance import Asked, probe
from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.state import State, load, save
from taskqueue_spark.service.windows import write_hours

__all__ = ["Batches"]

_DAMAGED = "damaged"


@dataclass(frozen=True)
class Batches:
    """What Spark calls with each batch. It keeps nothing in memory, so any process may go on with the next one."""

    options: StreamOptions
    ledgers: Callable[[Sequence[str]], Asked | None] | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Work a batch off. Given again, it changes nothing."""
        state = load(self.options.state)
        query = json.loads((self.options.checkpoint / "metadata").read_text())["id"]
        if state.query == query and number <= state.batch:
            return
        if state.query not in ("", query):  # the checkpoint was lost: numbers tell what was read
            self._sweep(state)
            state.generation += 1
        if state.generation:
            batch = folding.new_ones(batch, state.positions)
        name = f"{state.generation}-{number:09d}"
        self._archive(batch, name)
        state = self._fold(batch, name, state)
        state.query, state.batch = query, number
        if self.ledgers is not None and state.probe is None and state.books:
            asked = self.ledgers(sorted(state.books))
            if asked is not None:
                probe(state, asked)
        save(self.options.state, state)
        for folder in (self.options.folder / "open").iterdir():
            if folder.name != state.open:
                shutil.rmtree(folder, ignore_errors=True)

    def _archive(self, batch: DataFrame, name: str) -> None:
        """Write the transitions where no reader looks, then show them by one rename."""
        places = {
            "transitions": self.options.archive / f"batch={name}",
            _DAMAGED: self.options.out / _DAMAGED / f"batch={name}",
        }
        if places["transitions"].exists():  # shown last: it was all there
            return
        staging = self.options.folder / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        kind = F.when(F.col("event") == _DAMAGED, _DAMAGED).otherwise("transitions")
        (
            batch.withColumns({"kind": kind, "date": F.to_date("ts")})
            .write.partitionBy("kind", "date")
            .parquet(str(staging))
        )
        for part in (_DAMAGED, "transitions"):
            written = staging / f"kind={part}"
            place = places[part]
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                shutil.rmtree(place)
            if written.exists():
                written.rename(place)
        shutil.rmtree(staging, ignore_errors=True)

    def _fold(self, batch: DataFrame, name: str, state: State) -> State:
        """Return what is known after the batch, whose transitions are read from the archive."""
        spark = batch.sparkSession
        archived = self.options.archive / f"batch={name}"
        lines = _rows(self.options.out / _DAMAGED / f"batch={name}")
        if not archived.exists():
            state.damaged += lines
            return state
        transitions = spark.read.schema(batch.schema).parquet(str(archived))
        read = folding.reads(transitions)
        known = self.options.folder / "open" / state.open
        live = (
            spark.read.schema(f"{folding.OPEN}, here boolean")
            .parquet(str(known))
            .where("here")
            .drop("here")
            if state.open
            else spark.createDataFrame([], folding.OPEN)
        )
        told = folding.steps(transitions, live, [one.run for one in read]).persist()
        try:
            current = state.current | {one.shard: one.run for one in read}
            opened = self.options.folder / "open" / name
            folding.following(told, current).write.mode("overwrite").parquet(str(opened))
            counts = folding.counted(told, self.options.window, state.probe)
        finally:
            told.unpersist()
        new, hours = advance(
            state,
            read=read,
            counts=counts,
            alive=_alive(opened),
            beginnings=folding.beginnings(transitions),
        )
        new.open = name
        new.transitions += sum(one.different for one in read)
        new.damaged += lines
        write_hours(self.options.out / "metrics", new.windows, self.options.window, hours)
        without_old_windows(new, self.options.window, self.options.keep)
        return new

    def _sweep(self, state: State) -> None:
        """Take back what was shown of a batch that was never committed and will not be given again."""
        for folder in (self.options.archive, self.options.out / _DAMAGED):
            for place in folder.glob(f"batch={state.generation}-*"):
                if int(place.name.rpartition("-")[2]) > state.batch:
                    shutil.rmtree(place)


def _alive(opened: Path) -> list[Alive]:
    table = ds.dataset(opened, format="parquet").to_table(columns=["key", "state", "here"])
    counts = table.group_by(["key", "state", "here"]).aggregate([([], "count_all")])
    return [
        Alive(row["key"], row["state"], row["here"], row["count_all"]) for row in counts.to_pylist()
    ]


def _rows(folder: Path) -> int:
    return ds.dataset(folder, format="parquet").count_rows() if folder.exists() else 0
