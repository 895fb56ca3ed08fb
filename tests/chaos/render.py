"""Writes the results of campaigns into the documentation."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import durability, fairness, flows, outages
from tests.chaos.checker import Spread
from tests.chaos.totals import TOTALS, Totals, read_totals

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reliability.md"
BEGIN = "<!-- written by `python3 dev.py {command}`: begin -->"
END = "<!-- end -->"
BLOCKS = {
    "chaos --outages": (PAGE, outages.table),
    "chaos --fairness": (PAGE, fairness.table),
    "chaos --workflows": (PAGE, flows.table),
    "chaos --durability": (DOCS / "redis.md", durability.table),
}
"""for each command: the page that shows its results, and the function that renders the last results"""


def render(page: Path = PAGE, totals: Path = TOTALS) -> None:
    """Write the totals of all seeded runs into the page."""
    put("chaos", page, table(read_totals(totals)))


def put(command: str, page: Path, text: str) -> None:
    """Replace the text between the markers of a command in a page."""
    begin = BEGIN.format(command=command)
    head, found, rest = page.read_text("utf-8").partition(begin)
    if not found:
        raise ValueError(f"{page} has no {begin}")
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{begin}\n\n{text}\n{END}{tail}", "utf-8")


def table(totals: Totals) -> str:
    """Return the totals as Markdown tables."""
    faults = sum(totals.faults.values())
    rows = [
        ("runs, each with a seed of its own", f"{totals.runs:,}"),
        ("tasks confirmed by the store", f"{totals.tasks:,}"),
        ("deliveries", f"{totals.deliveries:,}"),
        ("faults", f"{faults:,}"),
        ("**confirmed tasks lost**", f"**{totals.lost:,}**"),
        ("runs that broke a rule", f"{len(totals.failed):,}"),
        (
            "deliveries held by processes that were killed, frozen or disconnected",
            f"{totals.held:,}",
        ),
        ("duplicates (delivered again without a release)", f"{totals.duplicates:,}"),
        ("settlements refused because the lease was lost", f"{totals.stale:,}"),
        ("publishes whose answer never came", f"{totals.unknown:,}"),
    ]
    names = {"killed": "was killed", "frozen": "was frozen", "cut": "was cut off"}
    rows += [
        (
            f"until a task was with another consumer after its holder {names.get(cause, cause)}",
            _times(spread),
        )
        for cause, spread in totals.redelivery.items()
        if spread.count
    ]
    rows += [
        ("until each consumer received again once the store was back", _times(totals.recovery)),
        (
            "until each producer had a confirmation again once the store was back",
            _times(totals.publishing),
        ),
    ]
    lines = [
        "| figure | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    lines += ["", "| fault | times |", "| --- | --- |"]
    lines += [f"| {name} | {count:,} |" for name, count in totals.faults.items()]
    lines += ["", f"Python {totals.python}, {totals.redis}."]
    return "\n".join(lines) + "\n"


def _times(spread: Spread) -> str:
    if not spread.count:
        return "not seen"
    return f"{spread.worst:.2f} s at worst ({spread.count:,} times)"


if __name__ == "__main__":
    render()
