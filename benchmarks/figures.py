"""Tables of figures by name, each with the values of all rounds: those with a target, and all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import targets
from tables import shown

Figures = Mapping[str, Mapping[str, Any]]


def tables(
    figures: Figures, goals: Iterable[targets.Goal], what: str
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return two tables, each with title, head and rows; ``what`` names the subject in their titles."""
    values = {name: figure["values"] for name, figure in figures.items()}
    reach = []
    for goal in goals:
        if (found := goal.value(values)) is not None:
            reached = "reached" if goal.reached(values) else "NOT reached"
            bound = f"{goal.sign} {goal.bound:g}"
            reach.append([goal.figure, goal.measure, bound, shown(found), reached])
    rows = [
        [name, shown(median(each)), f"{shown(min(each))} to {shown(max(each))}", str(len(each))]
        for name, each in values.items()
    ]
    return [
        (f"Figures of {what} to reach", ["figure", "measure", "reach", "found", ""], reach),
        (f"Figures of {what}", ["", "median", "range", "values"], rows),
    ]
