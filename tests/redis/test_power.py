"""A power cut, a kill, a failover: whatever Redis had not synced, or passed on, is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskqueue_core.capabilities import Durability
from tests.redis.losses import Case, Cut, build_shim, measure


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim under Redis' system calls that tells what was synced."""
    return build_shim(tmp_path_factory.mktemp("shim"))


async def test_synced_every_second(tmp_path: Path, shim: Path) -> None:
    """Fault B3: the class ``process`` loses what was confirmed in the last two seconds before a power cut at most."""
    loss = await measure(tmp_path, Case(Durability.PROCESS, Cut.POWER), 2.2, shim)
    assert loss.ages, "the shim cut nothing off"
    assert max(loss.ages) <= 2.0
    assert len(loss.ages) < loss.confirmed


async def test_synced_always(tmp_path: Path, shim: Path) -> None:
    """Fault B4: the class ``disk`` loses nothing that was confirmed."""
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
    """D17, faults B1 and C2: Redis is killed, or its lagging replica takes over; the class loses all, or nothing.

    While a sync goes on Redis answers before it writes, so here none does.
    """
    loss = await measure(tmp_path, case, 0.3)
    assert loss.confirmed > 0
    assert len(loss.ages) == (loss.confirmed if all_is_lost else 0)
