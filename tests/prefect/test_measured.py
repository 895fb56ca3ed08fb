"""Tests that the page about Prefect compares measured figures of the plugin with those of alternatives."""

from __future__ import annotations

import re

import pytest

from tests.binaries.folders import ROOT

PAGE = ROOT / "docs" / "prefect.md"
LONG = re.compile(r"8 runs of 8 s.*: executions")
_SECTION = re.compile(r"<!-- figures of servers: begin.*?-->(.*)<!-- figures of servers: end", re.DOTALL)  # fmt: skip


def side_by_side() -> dict[str, dict[str, str]]:
    """Return the page's table of figures: by what was measured, and then by implementation."""
    found = _SECTION.search(PAGE.read_text())
    assert found is not None
    lines = [line.strip("|") for line in found[1].split("Side by side", 1)[1].splitlines() if "|" in line]  # fmt: skip
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize(
    "figure",
    [
        "300 idle subscribers of 5 keys: CPU of the server, % of a core",
        "from POST to the worker, p50 ms",
        "creates by 8 clients, runs/s",
    ],
)
def test_its_cost_compared_with_the_stock_server(figure: str) -> None:
    """Row E9: each cost of the plugin is listed next to that of Prefect's own queue, from the same benchmark run."""
    row = side_by_side()[figure]
    assert all(re.match(r"[\d.,]+", row[whose]) for whose in ("ours", "stock"))


def test_the_alternative_compared_with_it() -> None:
    """Row REV-E7: docket alone was measured with the same long runs, workers and lease as the plugin."""
    (row,) = (row for figure, row in side_by_side().items() if LONG.match(figure))
    assert row["ours"] == "8"
    assert re.match(r"\d+", row["docket alone"])
