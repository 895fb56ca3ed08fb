"""The schedule of faults depends on its seed only."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.chaos.nemesis import MENUS, Fault, describe, read_faults, schedule, unleash

NUMBERS = {"redis": 1, "consumer": 3, "producer": 2}


def drawn(seed: int, menu: str) -> tuple[Fault, ...]:
    """Return the schedule of a seed."""
    return schedule(seed, menu, seconds=3.0, count=12, numbers=NUMBERS)


@pytest.mark.parametrize("menu", sorted(MENUS))
def test_a_seed_is_a_schedule(menu: str) -> None:
    """Equal seeds give equal schedules, other seeds different ones; faults are sorted by time and within the limit."""
    faults = drawn(7, menu)
    assert faults == drawn(7, menu)
    assert faults != drawn(8, menu)
    assert [fault.start for fault in faults] == sorted(fault.start for fault in faults)
    assert all(0 <= fault.start <= 3.0 for fault in faults)


def test_every_offer_is_drawn() -> None:
    """Over a hundred seeds, every kind of fault of the menu occurs, and every consumer is hit."""
    faults = [fault for seed in range(100) for fault in drawn(seed, "mixed")]
    assert {fault.name for fault in faults} == {
        f"{offer.kind} {offer.target}" for offer in MENUS["mixed"]
    }
    assert {fault.number for fault in faults if fault.target == "consumer"} == {0, 1, 2}


def test_a_target_is_hit_when_it_is_up() -> None:
    """Faults of one target do not overlap."""
    for seed in range(50):
        over: dict[tuple[str, int], float] = {}
        for fault in drawn(seed, "mixed"):
            whom = fault.target, fault.number
            assert fault.start >= over.get(whom, 0.0)
            over[whom] = fault.start + fault.length


def test_a_schedule_can_be_kept() -> None:
    """A saved schedule can be read back, and is printed with its seed."""
    faults = drawn(3, "mixed")
    assert read_faults(msgspec.to_builtins(faults)) == faults
    text = describe(3, "mixed", faults)
    assert text.startswith("seed 3, menu 'mixed':\n")
    assert len(text.splitlines()) == len(faults) + 1


async def test_faults_come_at_their_times() -> None:
    """Each fault starts at its time, even while another one lasts; `unleash` waits for all."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    seen: list[tuple[str, float]] = []

    async def inflict(fault: Fault) -> None:
        seen.append((fault.kind, loop.time() - begin))
        await asyncio.sleep(fault.length)
        seen.append((f"{fault.kind} over", loop.time() - begin))

    long, short = Fault("long", "x", 0, 0.0, 0.2), Fault("short", "y", 0, 0.05, 0.0)
    await unleash([long, short], inflict)
    assert [name for name, _ in seen] == ["long", "short", "short over", "long over"]
    assert seen[1][1] >= 0.05
