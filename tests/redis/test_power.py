"""Which confirmed tasks are lost in a power cut, a kill or a failover, for each durability class."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskqueue_core.capabilities import Durability
from tests.redis.losses import Case, Cut, build_shim, measure


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that records which data Redis has synced to disk."""
    return build_shim(tmp_path_factory.mktemp("shim"))


async def test_synced_every_second(tmp_path: Path, shim: Path) -> None:
    """Fault B3: a power cut loses at most the last two seconds of confirmed tasks in the class ``process``."""
    loss = await measure(tmp_path, Case(Durability.PROCESS, Cut.POWER), 2.2, shim)
    assert loss.ages, "the shim cut nothing off"
    assert max(loss.ages) <= 2.0
    assert len(loss.ages) < loss.confirmed


async def test_synced_always(tmp_path: Path, shim: Path) -> None:
    """Fault B4: a power cut loses no confirmed task in the class ``disk``."""
    loss = await measure(tmp_path, Case(Durability.DISK, Cut.POWER), 0.8, shim)
    assert loss.confirmed > 100
    assert not loss.ages


@pytest.mark.parametrize(
    ("case", "all_is_lost"),
    [
        (Case(Durability.MEMORY, Cut.KILL), True),
        (Case(Durability.PROCESS, Cut.KILL, sync="no"), False),
        (Case(Durability.REPLICATED, Cut.LAGGING_FAILOVER), False),
    ],
    ids=["memory", "process", "replicated"],
)
async def test_what_a_class_keeps(tmp_path: Path, case: Case, *, all_is_lost: bool) -> None:
    """D17, faults B1 and C2: after a kill or a failover to a lagging replica, a class loses all tasks or none.

    Nothing is synced during the measurement, because Redis may answer before it writes while a sync is in progress.
    """
    loss = await measure(tmp_path, case, 0.3)
    assert loss.confirmed > 0
    assert len(loss.ages) == (loss.confirmed if all_is_lost else 0)
