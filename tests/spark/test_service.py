"""Tests of the streaming service's state, alerts and files, without Spark."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.service import StreamOptions
from taskqueue_spark.service.aggregate import Beginning, EventCount, Read
from taskqueue_spark.service.alerts import Alerts, Condition, conditions
from taskqueue_spark.service.balance import probe, resolve
from taskqueue_spark.service.batches import sweep
from taskqueue_spark.service.state import (
    Position,
    Probe,
    QueueCounts,
    ServiceState,
    WindowCounts,
    load,
    save,
)
from taskqueue_spark.service.update import Alive, advance, note_positions, without_old_windows
from taskqueue_spark.service.windows import LEAST, METRICS, quantile, seconds_of, write_hours

NOW = 1_790_000_000.0
HOUR = int(NOW) // 3600 * 3600
KEY = "images"
FIRST, LATER = (Beginning(0, whole=whole, dark=False) for whole in (True, False))
OPEN = pa.schema(
    [
        ("key", pa.string()),
        ("task_id", pa.string()),
        ("state", pa.string()),
        ("since", pa.timestamp("us", tz="UTC")),
        ("worker", pa.string()),
        ("here", pa.bool_()),
    ]
)


def read(first: int, last: int, *, run: str = "r1", at: float = NOW, without: int = 0) -> Read:
    """Return the range of numbers that a batch has read from a shard."""
    return Read(0, run, first, last, last - first + 1 - without, at, at)


def after(
    state: ServiceState, *counts: tuple[str, int], live: int = 0, window: int = HOUR
) -> ServiceState:
    """Advance the state by a batch with these counts for one queue."""
    given = [EventCount(KEY, window, name, None, number) for name, number in counts]
    alive = [Alive(KEY, "waiting", here=True, number=live)] if live else []
    advance(state, counts=given, alive=alive, beginnings={KEY: FIRST}, cut=False)
    return state


def options(folder: Path, **given: Any) -> StreamOptions:
    """Return options of a service whose folders exist."""
    found = StreamOptions(out=folder, **given)
    (found.folder / "open").mkdir(parents=True)
    found.archive.mkdir()
    return found


def kinds(found: list[Condition]) -> list[str]:
    """Return the kinds of the alert conditions."""
    return [one.kind for one in found]


def test_books_balance() -> None:
    """A queue's counts balance if published equals ended plus live; unpublished tasks are found (G11; law 1)."""
    state = after(ServiceState(), ("published", 5), ("done", 2), ("expired", 1), live=2)
    assert state.books[KEY].balanced is True
    after(state, ("published", 1), ("done", 1), live=2)
    assert (state.books[KEY].published, state.books[KEY].ended["done"]) == (6, 3)
    after(state, ("adopted", 1), ("done", 1), live=2)
    assert state.books[KEY].balanced is False
    assert state.books[KEY].imbalance == -1


def test_what_is_missing() -> None:
    """A gap is recorded with its numbers, and from then on no queue's counts are known to balance (G11)."""
    state = ServiceState()
    assert note_positions(state, [read(1, 10)], NOW) is False
    assert note_positions(state, [read(11, 12)], NOW) is False
    assert note_positions(state, [read(15, 20, without=1)], NOW) is True
    (gap,) = state.gaps
    assert (gap.kind, gap.first, gap.last, gap.number) == ("missing", 13, 20, 3)
    advance(state, counts=(), alive=(), beginnings={KEY: FIRST}, cut=True)
    assert state.books[KEY].balanced is None


def test_a_tail_that_is_missing() -> None:
    """Missing numbers at a journal's end are one gap until a transition with the next number comes (G11).

    The row that reports them has the next number, and no time of its own (fault L2).
    """
    state = ServiceState()
    note_positions(state, [read(1, 12)], NOW)
    for last in (15, 18):
        assert note_positions(state, [Read(0, "r1", last + 1, last, 0, 0.0, 0.0)], NOW) is True
    (gap,) = state.gaps
    assert (gap.kind, gap.first, gap.last, gap.number) == ("missing", 13, 18, 6)
    assert (state.positions["r1/0"].last, state.positions["r1/0"].since) == (18, NOW)
    assert note_positions(state, [read(19, 20)], NOW) is False
    assert note_positions(state, [Read(0, "r1", 24, 23, 0, 0.0, 0.0)], NOW) is True
    assert [one.first for one in state.gaps] == [13, 21]


def test_a_journal_that_went_back() -> None:
    """Reused numbers are reported once, and then no queue's counts are known to balance (G11; fault L2)."""
    state = ServiceState()
    note_positions(state, [read(1, 100)], NOW)
    assert note_positions(state, [read(91, 95, at=NOW + 5)], NOW) is True
    assert note_positions(state, [read(96, 97, at=NOW + 6)], NOW) is False
    assert note_positions(state, [read(99, 101, at=NOW + 6)], NOW) is True
    assert [(gap.kind, gap.first, gap.last, gap.number) for gap in state.gaps] == [
        ("back", 91, 100, 5), ("missing", 98, 101, 1),
    ]  # fmt: skip
    found = conditions(state, StreamOptions(out=Path("x")), NOW)
    assert [(one.kind, one.of) for one in found] == [("reset", "r1/0/100"), ("missing", "r1/0/98")]


def test_a_queue_that_is_seen_later() -> None:
    """A queue that is first seen after a gap, or was not always journaled, is not known to balance (G11)."""
    state = ServiceState()
    cut = note_positions(state, [read(101, 110), Read(1, "s", 1, 5, 5, NOW, NOW)], NOW)
    advance(state, counts=(), alive=(), beginnings={}, cut=cut)
    cut = note_positions(state, [read(111, 112), Read(1, "s", 6, 7, 2, NOW, NOW)], NOW)
    there = {
        "of_the_cut": Beginning(0, whole=True, dark=False),
        "of_the_whole": Beginning(1, whole=True, dark=False),
        "had_settings": Beginning(1, whole=False, dark=False),
        "switched_off": Beginning(1, whole=True, dark=True),
    }
    advance(state, counts=(), alive=(), beginnings=there, cut=cut)
    assert {key: books.balanced for key, books in state.books.items()} == {
        "of_the_cut": None, "of_the_whole": True, "had_settings": None, "switched_off": None,
    }  # fmt: skip


def test_times_that_are_yet_to_come() -> None:
    """A single time in the far future closes no window and ends no run (G11; fault L3)."""
    state = ServiceState()
    note_positions(state, [read(1, 10)], NOW)
    note_positions(state, [Read(0, "r1", 11, 12, 2, NOW, NOW + 86_400 * 365)], NOW)
    assert NOW <= state.frontier <= NOW + 60
    note_positions(state, [read(1, 5, run="r2", at=NOW + 100)], NOW + 100)
    assert state.current() == {0: ["r2"]}
    assert state.frontier == NOW + 100


def test_what_was_cut_off_before() -> None:
    """Rows trimmed before the service's first read cause no alert, but the counts may not balance (G11)."""
    state = ServiceState()
    cut = note_positions(state, [read(100, 120)], NOW)
    advance(
        state,
        counts=[EventCount(KEY, HOUR, "adopted", None, 3), EventCount(KEY, HOUR, "done", None, 3)],
        alive=(),
        beginnings={KEY: LATER},
        cut=cut,
    )
    assert (state.gaps, state.books[KEY].balanced) == ([], None)


def test_a_store_that_was_replaced() -> None:
    """A run ends if another begins after its last row; two that continue at the same time stay current (G11)."""
    state = ServiceState()
    note_positions(state, [read(1, 10)], NOW)
    note_positions(state, [read(1, 5, run="r2", at=NOW + 1)], NOW)
    assert state.current() == {0: ["r2"]}
    note_positions(state, [read(11, 12, at=NOW + 2)], NOW)
    assert state.current() == {0: ["r1", "r2"]}
    alive = [Alive(KEY, "waiting", here=False, number=4)]
    counts = [EventCount(KEY, HOUR, "published", None, 4)]
    advance(state, counts=counts, alive=alive, beginnings={KEY: FIRST}, cut=False)
    assert (state.books[KEY].expired, state.books[KEY].balanced) == (4, True)
    assert [(gap.kind, gap.number) for gap in state.gaps] == [("reset", 4)]


def test_windows_close() -> None:
    """Only recent windows are kept in the state, in whole hours; rows that come later are counted (G11)."""
    state = ServiceState(frontier=HOUR + 30.0)
    for window in (HOUR - 7200, HOUR - 60, HOUR):
        after(state, ("event:acked", 2), window=window)
    without_old_windows(state, 60, 10)
    assert sorted(state.windows[KEY]) == [HOUR - 60, HOUR]
    after(state, ("event:acked", 3), window=HOUR - 7200)
    assert (state.late, sorted(state.windows[KEY])) == (3, [HOUR - 60, HOUR])
    assert state.books[KEY].events == {"acked": 9}


def test_files_of_windows(tmp_path: Path) -> None:
    """Each hour has a file with counts, rates and times, which is replaced as a whole (G11)."""
    window = WindowCounts(events={"acked": 90, "retried": 10}, waits={0: 94, 50: 6}, runs={})
    for _ in range(2):
        write_hours(tmp_path, {KEY: {HOUR: window, HOUR - 60: WindowCounts()}}, 60, [HOUR])
    (path,) = tmp_path.rglob("*.parquet")
    (row,) = pq.read_table(path, schema=METRICS).to_pylist()
    assert (row["acked"], row["acked_rate"], row["failed_share"]) == (90, 1.5, 0.1)
    assert row["wait_p50"] == seconds_of(0)
    assert row["wait_p95"] == seconds_of(50)
    assert row["run_p95"] is None


def test_classes_of_times() -> None:
    """A quantile is within 5 % of the time that it represents (G11)."""
    assert LEAST <= seconds_of(0) <= LEAST * 1.1
    assert quantile({}, 0.5) is None
    assert quantile({10: 1}, 0.95) == seconds_of(10)
    for place in range(100):
        assert 1.04 < seconds_of(place + 1) / seconds_of(place) < 1.11


def test_stuck_tasks(tmp_path: Path) -> None:
    """Tasks in flight or waiting for too long are reported per queue, with the oldest ones as samples (G11)."""
    told = options(tmp_path, stuck_after=60.0, waiting_after=600.0)
    ages = [("in_flight", n, 100.0 - n) for n in range(30)] + [
        ("in_flight", 50, 10.0),
        ("waiting", 51, 90.0),
    ]
    rows = [
        {"key": KEY, "task_id": f"t{n}", "state": state, "worker": "w", "here": n != 5,
         "since": dt.datetime.fromtimestamp(NOW - age, dt.UTC)}
        for state, n, age in ages
    ]  # fmt: skip
    (told.folder / "open/x").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=OPEN), told.folder / "open/x/part.parquet")
    (one,) = conditions(ServiceState(open="x"), told, NOW)
    assert (one.kind, one.of, one.details["tasks"]) == ("stuck", KEY, 29)
    assert one.details["samples"][:2] == ["t0", "t1"]
    assert len(one.details["samples"]) == 10
    assert kinds(conditions(ServiceState(open="x"), told, NOW + 600)) == ["stuck", "waiting"]


def test_rising_failure(tmp_path: Path) -> None:
    """A window's share of failures is reported if it is high, and higher than in the window before (G11)."""
    told = options(tmp_path, failure_share=0.2, failure_least=10)
    start = HOUR

    def failing(
        before: tuple[int, int], now: tuple[int, int], as_of: float = HOUR + 60.0
    ) -> list[str]:
        windows = {
            start - 60: WindowCounts(events={"acked": before[0], "retried": before[1]}),
            start: WindowCounts(events={"acked": now[0], "dead_lettered": now[1]}),
        }
        found = conditions(ServiceState(windows={KEY: windows}), told, as_of)
        return kinds([one for one in found if not one.over])

    assert failing((95, 5), (70, 30)) == ["failing"]
    assert failing((95, 5), (70, 30), HOUR + 59.0) == []  # the window has not ended yet
    assert failing((95, 5), (70, 30), HOUR + 120.0) == []  # the window after it has no events
    assert failing((95, 5), (85, 15)) == []
    assert failing((80, 20), (70, 30)) == []  # the share was high before
    assert failing((0, 0), (0, 10)) == ["failing"]
    assert failing((0, 0), (0, 9)) == []


def test_an_episode_is_reported_once(tmp_path: Path) -> None:
    """The start and the end of an episode are reported in one line each, even if the file's last line is torn (G11)."""
    path = tmp_path / "alerts.jsonl"
    lasting = Condition("stuck", KEY, "1 task", {"tasks": 1})
    passing = Condition("missing", "r1/0/5", "2 transitions", {}, passing=True)
    assert Alerts(path).report([lasting, passing], NOW) == 2
    with path.open("ab") as file:
        file.write(b'{"phase": "st')
    assert Alerts(path).report([lasting, passing], NOW) == 0
    assert Alerts(path).report([passing], NOW) == 1
    assert Alerts(path).report([], NOW) == 0
    assert Alerts(path).report([lasting], NOW) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["phase"], line["kind"]) for line in lines] == [
        ("start", "stuck"), ("once", "missing"), ("end", "stuck"), ("start", "stuck"),
    ]  # fmt: skip


def ledger(published: int, done: int, live: int) -> dict[str, int]:
    """Return a ledger as the store returns it."""
    others = ("blocked", "scheduled", "in_flight", "dead", "expired", "cancelled", "discarded")
    return dict.fromkeys(others, 0) | {"published": published, "done": done, "waiting": live}


def read_to(number: int) -> ServiceState:
    """Return the state of a service that has read the journal up to this number."""
    return ServiceState(positions={"r1/0": Position(last=number, since=NOW, until=NOW)})


def asked(before: int, after_it: int, told: dict[str, int]) -> Probe:
    """Return a ledger from the store, with the journal's numbers read before and after it."""
    return Probe(
        runs={0: "r1"},
        names={0: "{a:0}"},
        before={0: before},
        after={0: after_it},
        ledgers={KEY: told},
    )


def test_the_ledger_agrees(tmp_path: Path) -> None:
    """A ledger that was read while the store was in use must be within the bounds given by the journal (G11; law 1)."""
    state = after(read_to(20), ("published", 10), live=10)
    probe(state, asked(20, 20, ledger(10, 0, 10)))
    assert (state.probe, state.differing, state.books[KEY].balanced) == (None, {}, True)
    probe(state, asked(24, 30, ledger(15, 1, 14)))
    # the journal has not been read up to this point yet
    assert len(state.probe.ledgers) == 1 if state.probe else False
    note_positions(state, [read(21, 40)], NOW)
    up_to = (("low:published", 4), ("high:published", 6), ("high:done", 1))
    after(state, ("published", 9), ("done", 2), *up_to, live=17)
    assert state.probe is None
    assert not state.differing
    probe(state, asked(40, 40, ledger(20, 2, 18)))
    assert state.differing == {KEY: "published: increased by 10 in the ledger, by 9 in the journal"}
    assert kinds(conditions(state, options(tmp_path), NOW)) == ["imbalance"]
    probe(state, asked(40, 40, ledger(19, 2, 17)))
    assert state.differing == {}
    probe(state, asked(40, 40, ledger(19, 2, 16)))
    text = "published tasks in the store's ledger: 19, accounted for: 18"
    assert state.differing == {KEY: text}


def test_ledgers_of_a_store_of_several_parts() -> None:
    """A ledger waits until each partition is read up to its number or has another run (G11; fault L2)."""
    state = after(read_to(20), ("published", 10), live=10)
    state.offsets = {"r2/{a:1}": 8}
    two = msgspec.structs.replace(
        asked(20, 20, ledger(10, 0, 10)), runs={0: "r1", 1: "r2"}, names={0: "{a:0}", 1: "{a:1}"},
        before={0: 20, 1: 7}, after={0: 20, 1: 8},
    )  # fmt: skip
    probe(state, two)
    assert state.probe is not None
    state.offsets = {"r2/{a:1}": 9}
    resolve(state)
    assert [state.probe, state.differing, [*state.baselines]] == [None, {}, [KEY]]
    probe(state, msgspec.structs.replace(two, runs={0: "another", 1: "r2"}))
    assert [state.probe, state.baselines] == [None, {}]


def test_a_journal_that_began_later() -> None:
    """For a queue with tasks older than its journal, only the growth of ledger and journal is compared (G11)."""
    state = after(read_to(20), ("published", 10), ("adopted", 2), ("done", 2), live=10)
    assert state.books[KEY].balanced is False
    probe(state, asked(20, 20, ledger(110, 90, 20)))
    assert (state.differing, state.books[KEY].balanced) == ({}, None)


def test_the_state_is_a_file(tmp_path: Path) -> None:
    """The state can be saved and loaded; an invalid file or one of another version is refused (G11)."""
    path = tmp_path / "state.json"
    state = after(ServiceState(queries={"q": 4}), ("event:acked", 2), ("published", 2), live=2)
    state.windows[KEY][HOUR].waits[-3] = 1
    probe(state, asked(1, 1, ledger(2, 0, 2)))
    assert load(path).queries == {}
    save(path, state)
    assert load(path) == state
    for text in ("{", '{"version": 99}', "[]"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"state\.json"):
            load(path)


def test_a_batch_that_is_never_repeated(tmp_path: Path) -> None:
    """If the checkpoint is lost, a batch that was written but not committed is removed from the archive (G11)."""
    told = options(tmp_path)
    shown = [told.archive / f"batch=aaaaaaaa-{number:09d}" for number in range(3)]
    for place in shown:
        place.mkdir()
    with pytest.raises(ConfigurationError, match=r"list \(3\)"):
        sweep(told, ServiceState(), "bbbbbbbb-1")
    sweep(told, ServiceState(queries={"aaaaaaaa-1": 1}), "bbbbbbbb-1")
    assert [place.exists() for place in shown] == [True, True, False]


@pytest.mark.parametrize(
    "given",
    [
        {"trigger": -1.0}, {"stuck_after": float("nan")}, {"failure_share": 1.5}, {"window": 0}, {"max_events": 0},
        {"waiting_after": -5.0}, {"source": {"Keys": "a"}}, {"source": {"endingTimestamp": "2026-01-31"}},
        {"stuck_after": 1e12}, {"trigger": 1e10}, {"waiting_after": 1e10},
    ],
)  # fmt: skip
def test_options_are_checked(tmp_path: Path, given: dict[str, Any]) -> None:
    """An invalid option raises an error that names it (G11)."""
    with pytest.raises(InvalidInput) as caught:
        StreamOptions(out=tmp_path, **given)
    assert caught.value.field == next(iter(given))


def test_books_are_shown() -> None:
    """The counts of a queue without events balance (G11)."""
    assert QueueCounts().balanced is True
