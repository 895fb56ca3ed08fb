"""Whether capacity advice is right, in virtual time: it is derived from recorded loads, then tested with others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import spark_applied
import spark_stage
from spark_load import poisson, simulate
from spark_sizes import Sizes

_RATE, _MEAN, _TARGET = 300.0, 0.02, 0.01
_ROOM = 100
"""number of slots while a load is recorded, which is more than the load needs"""


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return for each load the ratio of the observed to the expected 95th percentile of the wait."""
    keys = [f"load-{number}" for number in range(sizes.loads)]
    with spark_stage.folder() as place, spark_stage.spark() as session:
        for number, key in enumerate(keys):
            _simulate(place / "recorded", key, 1000 * turn + 2 * number, sizes.tasks, _ROOM)
        found = spark_applied.advised(session, {"path": str(place / "recorded")}, _TARGET)
        for number, key in enumerate(keys):
            slots = found[key]["slots"]
            _simulate(place / "applied", key, 1000 * turn + 2 * number + 1, sizes.tasks, slots)
        observed = spark_applied.observed(session, {"path": str(place / "applied")})
    ratios = [observed[key] / found[key]["expected_wait"] for key in keys]
    return {"capacity, virtual time: observed p95 wait, x expected": ratios}


def _simulate(journal: Path, key: str, seed: int, tasks: int, slots: int) -> None:
    journal.mkdir(exist_ok=True)
    load = poisson(seed, tasks, rate=_RATE, mean=_MEAN)
    asyncio.run(simulate(journal / f"{key}.jsonl", key, load, slots))
