"""Seeded schedules with all kinds of faults, and replays of schedules that once failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.nemesis import MENUS
from tests.chaos.render import table
from tests.chaos.seeded import MIX, Report, Scenario, carry_out, scenario
from tests.chaos.totals import (
    Totals,
    add_regression,
    read_regressions,
    read_totals,
    reset,
    updated,
)
from tests.chaos.world import Shape

CASES = [
    ("mixed", 0),
    *(
        pytest.param(menu, seed, marks=pytest.mark.chaos)
        for menu in sorted(MENUS)
        for seed in range(1, 6)
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("menu", "seed"), CASES)
def test_a_night(menu: str, seed: int) -> None:
    """Faults A1, B1, B10, B16 and E5, all laws: no combination of faults breaks a rule."""
    report = carry_out(scenario(10_000 + seed, menu), Shape(tasks=1000, seconds=1.2))
    assert report.ok, str(report)


REPLAYS = [
    pytest.param(told, id=f"{told.seed}-{told.menu}", marks=[pytest.mark.chaos] if at >= 3 else [])
    for at, told in enumerate(reversed(read_regressions()))
]
"""the long tests replay the latest three; the chaos tests replay all"""


@pytest.mark.long
@pytest.mark.parametrize("told", REPLAYS)
def test_what_has_failed_once(told: Scenario) -> None:
    """A schedule that broke a rule in the past does not break one any more."""
    report = carry_out(told)
    assert report.ok, str(report)


def test_every_menu_is_in_the_mix() -> None:
    """Campaigns use every menu."""
    assert set(MIX) == set(MENUS)
    assert {scenario(seed).menu for seed in range(len(MIX))} == set(MENUS)


def test_a_failed_run_is_kept_once(tmp_path: Path) -> None:
    """The list of regressions can be read back and contains each run only once."""
    path = tmp_path / "regressions.toml"
    report = Report(scenario=scenario(5), violations=('R1 q/t: lost: "it" \\ is gone',))
    for _ in range(2):
        add_regression(report, path)
    assert read_regressions(path) == [report.scenario]


def test_totals_add_up(tmp_path: Path) -> None:
    """Totals add up over several campaigns; a reset clears them but keeps the next seed."""
    path = tmp_path / "results" / "totals.json"
    failed = Report(scenario=scenario(2), violations=("R1",), rules={"R1": 1}, wall=2.0)
    for report in (Report(scenario=scenario(1), wall=1.0), failed):
        with updated(path) as totals:
            totals.next_seed += 1
            totals.add(report, "redis-server 7.0.15")
    totals = read_totals(path)
    assert (totals.runs, totals.wall, totals.next_seed) == (2, 3.0, 3)
    assert [one.seed for one in totals.failed] == [2]
    assert "| runs, each with a seed of its own | 2 |" in table(totals)
    reset(path)
    assert read_totals(path) == Totals(next_seed=3)
