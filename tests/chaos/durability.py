"""Measures what each durability class loses, over many crashes: `python3 dev.py chaos --durability`."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from taskqueue_core.capabilities import Durability
from tests.redis.losses import LAG, Case, Cut, Loss, build_shim, measure

RESULTS = Path(__file__).parent / "results" / "durability.json"
_SLOW = 0.5
_LOAD = (0.6, 1.2)
"""minimum and maximum seconds of load before a crash"""
_LOAD_FOR_SYNCS = (2.0, 3.5)
"""the same, for cases in which the time since the last sync to disk matters; Redis syncs once per second"""

CASES = (
    Case(Durability.MEMORY, Cut.KILL),
    Case(Durability.MEMORY, Cut.POWER),
    Case(Durability.PROCESS, Cut.KILL),
    Case(Durability.PROCESS, Cut.KILL, _SLOW),
    Case(Durability.PROCESS, Cut.POWER),
    Case(Durability.PROCESS, Cut.POWER, _SLOW),
    Case(Durability.PROCESS, Cut.FAILOVER),
    Case(Durability.PROCESS, Cut.LAGGING_FAILOVER),
    Case(Durability.DISK, Cut.KILL),
    Case(Durability.DISK, Cut.POWER),
    Case(Durability.REPLICATED, Cut.FAILOVER),
    Case(Durability.REPLICATED, Cut.LAGGING_FAILOVER),
)
_LOSSLESS = frozenset(
    case for case in CASES if case.durability in {Durability.DISK, Durability.REPLICATED}
) - {Case(Durability.DISK, Cut.KILL)}
_MORE = 4
"""factor by which cases that must lose nothing are measured more often"""
_WORDS = {
    Cut.KILL: "Redis killed",
    Cut.POWER: "power cut",
    Cut.FAILOVER: "master killed, replica promoted",
    Cut.LAGGING_FAILOVER: f"the same, the replica cut off {LAG:g} s before",
}


class Row(msgspec.Struct, kw_only=True):
    """Results of all runs of one case."""

    case: Case
    runs: int = 0
    confirmed: int = 0
    lost: int = 0
    losing: int = 0
    """number of runs that lost anything"""
    most: int = 0
    """maximum number of tasks lost in one run"""
    oldest: float = 0.0
    """maximum seconds for which a lost task had been confirmed before the crash"""

    @property
    def happened(self) -> str:
        """Description of the crash for the table."""
        slow = f", each sync takes {self.case.slow_disk:g} s" if self.case.slow_disk else ""
        return f"{_WORDS[self.case.cut]}{slow}"

    def add(self, loss: Loss) -> None:
        """Add the result of one run."""
        self.runs += 1
        self.confirmed += loss.confirmed
        self.lost += len(loss.ages)
        self.losing += bool(loss.ages)
        self.most = max(self.most, len(loss.ages))
        self.oldest = max(self.oldest, *loss.ages, 0.0)


def campaign(runs: int, jobs: int = 2) -> Iterator[Row]:
    """Measure every case ``runs`` times and save the results. Yields each case when it has been measured.

    Cases that promise to lose nothing are measured four times as often.
    """
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="taskqueue-durability-") as folder,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        shim = build_shim(Path(folder))
        for case in CASES:
            row = Row(case=case)
            times = runs * (_MORE if case in _LOSSLESS else 1)
            for one in as_completed([pool.submit(_run, case, n, shim) for n in range(times)]):
                row.add(one.result())
            rows.append(row)
            yield row
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def _run(case: Case, number: int, shim: Path) -> Loss:
    everysec = case.slow_disk or (case.durability, case.cut) == (Durability.PROCESS, Cut.POWER)
    load = random.Random(f"{case} {number}").uniform(*(_LOAD_FOR_SYNCS if everysec else _LOAD))
    with tempfile.TemporaryDirectory(prefix="taskqueue-durability-") as folder:
        needed = shim if case.slow_disk or case.cut is Cut.POWER else None
        return asyncio.run(measure(Path(folder), case, load, needed))


def table(path: Path = RESULTS) -> str:
    """Return the results of the last campaign as a Markdown table."""
    lines = [
        "| `durability` | what happened | runs | confirmed | lost | lost in one run | the oldest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in msgspec.json.decode(path.read_bytes(), type=list[Row]):
        worst = ["all", "all"] if row.lost == row.confirmed else [f"{row.most:,}", _age(row)]
        lines.append(
            f"| `{row.case.durability}` | {row.happened} | {row.runs} | {row.confirmed:,} "
            f"| {row.lost:,} | {' | '.join(worst if row.lost else ['', ''])} |"
        )
    return "\n".join(lines) + "\n"


def _age(row: Row) -> str:
    return f"{row.oldest * 1000:,.0f} ms"
