"""Workflows and schedules under faults: `python3 dev.py chaos --workflows` runs twenty seeds of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.flows import Row, read, table
from tests.chaos.nemesis import WORKFLOWS
from tests.chaos.seeded import Report, carry_out, scenario

OFTEN = ("manifest", "schedules")
"""kinds of which `dev.py test --all` runs one seed; the chaos tests run one of each"""
KINDS = [pytest.param(kind, marks=[] if kind in OFTEN else pytest.mark.chaos) for kind in WORKFLOWS]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_none_lost_and_none_doubled(kind: str) -> None:
    """U14, U16, faults A1, A6 and B1: each instant is fired once, each step is released once, when it may be."""
    report = carry_out(scenario(0, kind))
    assert report.ok, str(report)
    assert report.figures.lost == report.figures.flows.doubled == 0
    assert report.figures.flows.releases
    assert report.figures.flows.instants


def test_the_table_has_each_kind(tmp_path: Path) -> None:
    """Results are saved by kind, and the table names the fault."""
    path = tmp_path / "workflows.json"
    row = Row(kind="release")
    row.add(Report(scenario=scenario(3, "release"), violations=("R1",), rules={"R1": 1}))
    row.save(path)
    Row(kind="held", runs=2).save(path)
    assert [one.kind for one in read(path)] == ["release", "held"]
    assert read(path)[0].failed == [3]
    assert len(table(path).splitlines()) == 4
