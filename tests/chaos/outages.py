"""Store outages of a given length (killed, frozen or cut off), and how soon every process works again afterwards."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from tests.chaos.checker import Spread
from tests.chaos.history import Event, What
from tests.chaos.replicas import Replicas
from tests.chaos.world import Outcome, Shape, World

RECOVERY = 5.0
"""maximum seconds from the store's return until every process works again"""
RESULTS = Path(__file__).parent / "results" / "outages.json"
_LOAD = 1.5
"""seconds of load before a long outage"""
_AS_SHIPPED = Shape(
    tasks=4000,
    seconds=4.0,
    hold=0.2,
    lease=15.0,
    housekeeping=2.0,
    answer_timeout=5.0,
    operation_timeout=10.0,
    liveness=120.0,
)
_SIGNS = {
    "consumer": What.RECEIVED,
    "server": What.RECEIVED,
    "worker": What.EXECUTED,
    "producer": What.PUBLISHED,
}
_WORDS = {
    "kill": "Redis killed",
    "freeze": "Redis frozen",
    "block": "every link blocked, both ways",
    "deafen": "every link blocked, answers only",
}


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """One outage: what happens to the store, and for how many seconds it is unavailable."""

    fault: str
    """id of the fault, for example B1"""
    kind: str
    length: float
    links: bool = False
    """whether the fault hits all links between processes and store instead of Redis"""
    servers: bool = False
    """whether clients use servers, which are then the only ones connected to Redis"""

    def __str__(self) -> str:
        """Return the outage as a cell of the results table."""
        tail = ", seen through two servers" if self.servers else ""
        return f"{self.fault}: {_WORDS[self.kind]}{tail}"


LONG = (
    Outage(fault="E5", kind="block", length=300, links=True),
    Outage(fault="E5", kind="deafen", length=300, links=True),
    Outage(fault="B1", kind="kill", length=120),
    Outage(fault="B1", kind="kill", length=120, servers=True),
    Outage(fault="B10", kind="freeze", length=60),
    Outage(fault="E5", kind="block", length=30, links=True),
    Outage(fault="E5", kind="deafen", length=30, links=True),
    Outage(fault="B1", kind="kill", length=30),
    Outage(fault="B1", kind="kill", length=30, servers=True),
)
"""sorted by length, longest first, so that two concurrent jobs end at about the same time"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an outage. Times are seconds after the store's return; the slowest process counts."""

    outage: Outage
    tasks: int = 0
    lost: int = 0
    held: int = 0
    duplicates: int = 0
    consumers: Spread = Spread()
    producers: Spread = Spread()
    problems: tuple[str, ...] = ()


async def suffer(
    folder: Path, outage: Outage, shape: Shape, *, seed: int = 0, load: float = 0.0
) -> tuple[Outcome, Row]:
    """Run an outage after ``load`` seconds of load; check all rules, and that every process recovers."""
    kind = Replicas if outage.servers else World
    connecting = {"TASKQUEUE_REDIS_CONNECT_TIMEOUT": "2"} if shape is _AS_SHIPPED else {}
    async with kind(folder, shape, seed=seed, env=connecting) as world:
        await world.begin()
        await asyncio.sleep(load)
        if outage.links:
            everybody = [(f"link-{actor.role}", actor.number) for actor in world.cast.all]
            await asyncio.gather(
                *(world.inflict(outage.kind, *whom, outage.length) for whom in everybody)
            )
        else:
            await world.inflict(outage.kind, "redis", 0, outage.length)
        outcome = await world.finish()
        names = [actor.name for actor in world.cast.all]
    return outcome, _row(outage, outcome, names)


def _row(outage: Outage, outcome: Outcome, names: list[str]) -> Row:
    figures = outcome.verdict.figures
    returned = max(event.at for event in outcome.events if event.what is What.HEALED)
    # Skip producers that had published everything before the store returned.
    over = {e.by for e in outcome.events if e.what is What.ENDED and e.at < returned}
    back = {name: _back(outcome.events, name, returned) for name in names if name not in over}
    problems = [str(one) for one in outcome.verdict.violations[:20]]
    for name, seconds in back.items():
        if seconds is None:
            problems.append(f"{name} never came back")
        elif seconds > RECOVERY:
            problems.append(f"{name} came back after {seconds:.2f} s")
    if figures.duplicates > figures.held:
        problems.append(f"{figures.duplicates} duplicates of {figures.held} held")
    producing = {name for name in names if name.startswith("producer")}
    return Row(
        outage=outage,
        tasks=figures.tasks,
        lost=figures.lost,
        held=figures.held,
        duplicates=figures.duplicates,
        consumers=Spread.of([at for name, at in back.items() if at and name not in producing]),
        producers=Spread.of([at for name, at in back.items() if at and name in producing]),
        problems=tuple(problems),
    )


def _back(events: list[Event], name: str, returned: float) -> float | None:
    """Return how many seconds after the outage a process did work again; None if it never did."""
    sign = _SIGNS[name.partition("-")[0]]
    good = {"", "accepted", "duplicate"}
    return next(
        (
            event.at - returned
            for event in events
            if event.by == name
            and event.what is sign
            and event.outcome in good
            and event.at > returned
        ),
        None,
    )


def campaign(jobs: int = 2) -> Iterator[Row]:
    """Run every long outage with the default timeouts of the product, and save the results."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for one in as_completed([pool.submit(_carry_out, outage) for outage in LONG]):
            rows.append(one.result())
            yield rows[-1]
    rows.sort(key=lambda row: (row.outage.fault, row.outage.kind, row.outage.servers))
    rows.sort(key=lambda row: row.outage.length)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def _carry_out(outage: Outage) -> Row:
    """Run one outage. If there are problems, its logs stay in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="taskqueue-outage-"))
    try:
        _, row = asyncio.run(suffer(folder / "run", outage, _AS_SHIPPED, load=_LOAD))
    except Exception as error:  # noqa: BLE001 - a run that breaks off counts as failed, and the next one follows
        row = Row(outage=outage, problems=(f"it broke off: {type(error).__name__}: {error}",))
    if row.problems:
        return msgspec.structs.replace(row, problems=(*row.problems, f"logs: {folder}"))
    shutil.rmtree(folder, ignore_errors=True)
    return row


def table(path: Path = RESULTS) -> str:
    """Return the results of the last campaign as a Markdown table."""
    lines = [
        "| outage | seconds | tasks | lost | duplicates | consumers back | producers back |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.outage}{' **FAILED**' if row.problems else ''} | {row.outage.length:g} | {row.tasks:,} "
        f"| {row.lost} | {row.duplicates} | {row.consumers.worst:.2f} s | {row.producers.worst:.2f} s |"
        for row in msgspec.json.decode(path.read_bytes(), type=list[Row])
    ]
    return "\n".join(lines) + "\n"
