"""Schedules through both changes of the clock in five zones, on the stores in this process."""

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.recordstore import RecordBackend
from taskqueue_memory import MemoryBackend
from tests.core.dict_store import DictStore, Disk
from tests.core.zone_changes import Change, Night, changes

CHANGES = tuple(changes())


@pytest.mark.parametrize("outage", [False, True], ids=["served", "outage"])
@pytest.mark.parametrize("kind", ["memory", "records"])
async def test_each_instant_of_the_calendar(kind: str, *, outage: bool) -> None:
    """U14: each instant around each change is fired once, by three loops; after an outage, as ``catch_up`` says."""
    for change in CHANGES:
        clock = ManualClock(change.at - 86_400)
        backend = (
            MemoryBackend(clock=clock)
            if kind == "memory"
            else RecordBackend("dict", DictStore(Disk()), clock, durable=True)
        )
        await Night(change, clock, [backend] * 3, loops=kind == "memory").run(outage=outage)
        await backend.aclose()


def test_the_changes() -> None:
    """U14: the zones skip and repeat an hour, or half an hour, and one of them at midnight."""
    shifts = {change.zone: abs(change.after - change.before).total_seconds() for change in CHANGES}
    assert set(shifts.values()) == {3600, 1800}
    assert len(CHANGES) == 10
    assert {type(change) for change in CHANGES} == {Change}
    nightly = {change.walls[1] for change in CHANGES if change.zone == "America/Santiago"}
    assert nightly == {(0, 30), (23, 30)}
