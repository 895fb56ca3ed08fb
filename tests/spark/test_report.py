"""Tests of the report's HTML page and its plots, with sample data and without Spark."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from taskqueue_spark.pipeline.tables import replace_file
from taskqueue_spark.report import numbers
from taskqueue_spark.report.outcome import outcome_of
from taskqueue_spark.report.page import page
from taskqueue_spark.report.plots import Series, over_time
from tests.spark.report_sample import EVIL, START, conserved, sample, total


class Seen(HTMLParser):
    """Parses a page, and collects its tags and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a start tag with its attributes."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Record a piece of text."""
        self.texts.append(data)

    def found(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of each element with this tag."""
        return [attributes for name, attributes in self.tags if name == tag]


def test_texts_of_tasks_stay_texts() -> None:
    """HTML in ids, errors, tenants and worker names is escaped, in plots as well (G10)."""
    seen = Seen(page(sample()))
    names = {name for name, _ in seen.tags}
    assert not names & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert len(seen.found("style")) == 1
    assert not [word for _, attributes in seen.tags for word in attributes if word.startswith("on")]
    text = "".join(seen.texts)
    assert text.count("<script>alert(1)</script>") > 15


def test_the_page_needs_nothing_else() -> None:
    """The page refers to no other resource, and its content security policy forbids loading any (G10)."""
    html = page(sample())
    seen = Seen(html)
    refers = {"src", "href", "srcset", "action", "data", "xlink:href"}
    assert not [attributes for _, attributes in seen.tags if refers & attributes.keys()]
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [one for one in seen.found("meta") if one.get("http-equiv")]
    assert (policy["content"] or "").startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_every_plot_is_described_and_fits_both_screens() -> None:
    """Each plot has a title and a description with unique ids, and a wide and a narrow version (G10)."""
    html = page(sample())
    plots = Seen(html).found("svg")
    assert len(plots) >= 16
    kinds = [str(plot["class"]) for plot in plots]
    assert kinds.count("plot wide") == kinds.count("plot narrow")
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for plot in plots:
        assert plot["role"] == "img"
        assert set(str(plot["aria-labelledby"]).split()) <= set(ids)
    assert "prefers-color-scheme: dark" in html
    assert "max-width: 720px" in html


def test_the_page_is_the_same_for_the_same_figures() -> None:
    """The same data gives exactly the same page (G10)."""
    assert page(sample()) == page(sample())


def test_figures_are_those_of_the_tables() -> None:
    """The page shows the figures of the tables, and commands that can be pasted into a shell (G10)."""
    seen = Seen(page(sample()))
    text = " ".join(" ".join(seen.texts).split())
    for words in (
        "Tasks were lost",
        "1,340 published",
        "1,328 completed",
        "7 transitions are missing",
        "lost 2",
        "✗ 2",
    ):
        assert words in text
    redrive = text[text.index("taskqueue pipeline redrive") :]
    assert shlex.split(redrive.partition(" --from here")[0])[-1] == EVIL
    assert "--max-inflight 12 --rate 400/10s" in text


def test_a_report_of_nothing_is_a_page_too() -> None:
    """The report of an empty journal is a valid page that says so (G10)."""
    nothing: list[Any] = []
    account = {
        "total": total(),
        "conservation": nothing,
        "lost": nothing,
        "gaps": nothing,
        "ledgers": nothing,
    }
    extent = {
        "since": None,
        "until": None,
        "seconds": 0.0,
        "transitions": 0,
        "runs": 0,
        "workers": 0,
    }
    empty = dict.fromkeys(
        (
            "violations", "latency", "latency_over_time", "classes", "concurrency", "fairness", "failures", "capacity",
            "throughput",
        ),
        nothing,
    )  # fmt: skip
    flow: dict[str, Any] = {"seconds": 1.0, "start": None, "windows": 0, "all": {}, "keys": nothing}
    verdict = {"kind": "empty", "title": "There are no tasks to check", "sentences": ["None."]}
    html = page(sample(**empty, account=account, extent=extent, flow=flow, verdict=verdict))
    assert "There are no tasks to check" in html
    assert "No attempt failed." in html


@pytest.mark.parametrize(
    ("rows", "more", "kind", "words"),
    [
        ([], {}, "empty", "no task"),
        ([{"published": 2, "completed": 2}], {}, "balanced", "no task is lost"),
        ([{"published": 2, "completed": 1, "lost": 1}], {}, "lost", "1 task is lost: neither ended nor in the store"),
        ([{"published": 3, "completed": 2, "balanced": False}], {}, "unbalanced", "not the sum"),
        ([{"published": 2, "completed": 2}], {"short": 1}, "unbalanced", "not in the ledger of the store"),
        ([{"published": 1, "completed": 1}], {"rules": [{"rule": "R3", "count": 1}]}, "violated", "1 violation "),
        ([{"published": 1, "completed": 1}], {"anomalies": {"duplicate_ack": 1}}, "violated", "completed twice"),
        ([{"published": 1, "unknown": 1}], {}, "unknown", "is unknown, because"),
        ([{"published": 1, "completed": 1, "complete": False}], {}, "unknown", "tasks may have been lost"),
        ([{"published": 1, "completed": 1}], {"gaps": 1}, "unknown", "1 transition is missing"),
        ([{"published": 1, "completed": 1}], {"damaged": 2}, "unknown", "2 of the journal's entries cannot be read"),
        ([{"published": 1, "waiting": 1}], {"store_checked": True}, "balanced", "according to the store"),
        ([{"published": 1, "waiting": 1}], {}, "balanced", "the store was not queried"),
    ],
)  # fmt: skip
def test_audit_outcomes(
    rows: Sequence[dict[str, Any]], more: dict[str, Any], kind: str, words: str
) -> None:
    """The worst finding is the title, and unknown tasks are never reported as no loss (G9, G10)."""
    verdict = outcome_of(total(*(conserved("k", **row) for row in rows)), **more)
    assert verdict.kind == kind
    assert words in " ".join(verdict.sentences)
    assert verdict.ok == (kind in {"empty", "balanced", "unknown"})


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"), (0, "0 s"), (-1, "0 s"), (0.000_004, "0.004 ms"), (0.0042, "4.2 ms"), (0.0123, "12 ms"),
        (0.9996, "1.00 s"), (1.236, "1.24 s"), (12.34, "12.3 s"), (59.999, "1 m 00 s"), (125, "2 m 05 s"),
        (11_400, "3 h 10 m"), (187_200, "2 d 04 h"),
    ],
)  # fmt: skip
def test_times_read_well(number: float | None, text: str) -> None:
    """A duration is shown in a suitable unit, with at most three significant digits below a minute (G10)."""
    assert numbers.seconds(number) == text


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0, [0, 1]), (1, [0, 0.5, 1]), (7, [0, 2, 4, 6, 8]), (0.03, [0, 0.01, 0.02, 0.03]),
        (4000, [0, 1000, 2000, 3000, 4000]),
    ],
)  # fmt: skip
def test_axes_have_round_marks(top: float, expected: list[float]) -> None:
    """The marks of an axis are round numbers from 0 to the highest value or just above (G10)."""
    assert numbers.marks(top) == expected


def test_axes_of_time_have_marks_on_the_clock() -> None:
    """The marks of a time axis are at whole minutes, hours or days, or at fractions of a second (G10)."""
    start = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)
    assert [text for _, text in numbers.time_marks(start, 300)] == [f"12:0{n}" for n in range(1, 6)]
    assert [text for _, text in numbers.time_marks(START, 0.4)][1] == "12:00:00.1"
    for length in (1.0, 7.3, 4000.0, 90_000.0, 3e6, 4e8):
        assert 1 <= len(list(numbers.time_marks(start, length))) <= 7


def test_lines_stop_where_there_is_nothing() -> None:
    """A line has a gap where a window has no value, and a lone value is drawn as a dot (G10)."""
    svg = over_time("t", "a", [Series("x", [1, 4, None, 2, None])], start=START, step=1)
    wide = svg[: svg.index("</svg>")]
    (line,) = re.findall(r'<polyline[^>]*points="([^"]+)"', wide)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == 2
    assert wide.count("<circle") == 1
    assert all(0 <= x <= 960 and 0 <= y <= 250 for x, y in points)
    assert points[1][1] < points[0][1]  # a higher value has a smaller y coordinate
    assert wide.count('class="hit"') == 5


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is replaced only by a complete one, and a failed write leaves nothing behind (G10; fault L1)."""
    path = tmp_path / "report.html"
    replace_file(path, b"one")

    def fails(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
