"""Results of campaigns are added up correctly and are shown in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskqueue_core.capabilities import Durability
from tests.chaos.durability import Row
from tests.chaos.render import BEGIN, BLOCKS, END, put
from tests.redis.losses import Case, Cut, Loss


@pytest.mark.parametrize("command", BLOCKS)
def test_the_pages_show_the_last_results(command: str) -> None:
    """D17: a page shows the figures of the last campaign."""
    page, table = BLOCKS[command]
    _, found, rest = page.read_text("utf-8").partition(BEGIN.format(command=command))
    assert found
    assert rest.partition(END)[0].strip() == table().strip()


def test_a_block_is_replaced(tmp_path: Path) -> None:
    """Writing a block keeps the text around it and other blocks; a page without the markers is not changed."""
    page = tmp_path / "page.md"
    one, two = (BEGIN.format(command=name) for name in ("one", "two"))
    page.write_text(f"head\n{one}\nold\n{END}\nbetween\n{two}\nkept\n{END}\ntail\n")
    put("one", page, "new\n")
    assert page.read_text() == (f"head\n{one}\n\nnew\n\n{END}\nbetween\n{two}\nkept\n{END}\ntail\n")
    with pytest.raises(ValueError, match="has no"):
        put("three", page, "")


def test_runs_add_up() -> None:
    """A row sums up its runs and keeps the worst values."""
    row = Row(case=Case(Durability.PROCESS, Cut.POWER))
    for loss in (Loss(10, (0.5, 0.25)), Loss(20, ()), Loss(30, (1.5,))):
        row.add(loss)
    assert (row.runs, row.confirmed, row.lost, row.losing, row.most) == (3, 60, 3, 2, 2)
    assert row.oldest == 1.5
