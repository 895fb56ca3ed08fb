"""Tables of figures with their values in all rounds: one of the figures that have a target, and one of all figures."""

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
    """Return two tables, each as a title, a header and rows. ``what`` is the subject that the titles name."""
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
