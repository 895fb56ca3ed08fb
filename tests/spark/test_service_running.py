"""Tests of the streaming service's process, without Spark: its start, its reports and its end."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.service import StreamOptions, Summary, process
from taskqueue_spark.service.alerts import Alerts, check_windows, conditions
from taskqueue_spark.service.state import Gap, QueueCounts, ServiceState, WindowCounts, save
from tests.spark.test_service import HOUR, KEY, NOW, options

SPARK = SparkSession.__new__(SparkSession)


class Progress:
    """The progress report of a batch, as Spark's query returns it."""

    def __init__(
        self, batch: int, rows: int = 5, behind: int = 0, at: str = "2026-09-21T14:13:20.000Z"
    ) -> None:
        ends = {
            "endOffset": {"a": {"run": "r", "next": 9}},
            "latestOffset": {"a": {"run": "r", "next": 9 + behind}},
        }
        told = {
            "batchId": batch,
            "timestamp": at,
            "durationMs": {},
            "sources": [{"numInputRows": rows, **ends}],
        }
        self.json = json.dumps(told)


class Query(StreamingQuery):
    """A streaming query that calls the next of the given functions at each wait."""

    def __init__(self, *looks: Callable[[Query], None]) -> None:
        self._looks = list(looks)
        self.told: list[Progress] = []
        self.works = self.stopped = False
        self.asked = 0

    isActive = property(lambda self: bool(self._looks))  # noqa: N815 - Spark's interface has this name
    status = property(lambda self: {"isTriggerActive": self.works})
    lastProgress = property(lambda self: self.told[-1] if self.told else None)  # noqa: N815

    @property
    def recentProgress(self) -> Any:  # noqa: N802 - Spark's interface has this name
        """Return all progress reports, and count the calls."""
        self.asked += 1
        return self.told

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: ARG002, N802
        """Call the next function instead of waiting."""
        if self._looks:
            self._looks.pop(0)(self)
        return None

    def exception(self) -> Any:
        """Return ``None``, because the query has not failed."""

    def stop(self) -> None:
        """Record that the query was stopped."""
        self.stopped = True


def ran(query: Query, told: StreamOptions, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Summary:
    """Run the service with this query."""
    monkeypatch.setattr(process, "_start", lambda *_: query)
    return process.run(SPARK, told, **more)


def lines(told: StreamOptions) -> list[tuple[str, str]]:
    """Return the phase and kind of each line in the file of alerts."""
    path = told.folder / "alerts.jsonl"
    found = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [(one["phase"], one["kind"]) for one in found]


def test_a_query_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the query fails, the service fails with the same error (G11)."""
    query = Query()
    monkeypatch.setattr(Query, "exception", lambda _: RuntimeError("out of reach"))
    with pytest.raises(RuntimeError, match="out of reach"):
        ran(query, StreamOptions(out=tmp_path), monkeypatch)
    assert query.stopped


def test_a_folder_with_a_snapshot(tmp_path: Path) -> None:
    """A folder that contains a snapshot is refused as an archive (G11)."""
    (tmp_path / "transitions/date=2026-01-31").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="snapshot"):
        process.run(SPARK, StreamOptions(out=tmp_path))


def test_one_service_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder can be used by one service at a time, and by another one afterwards (G11)."""
    told = options(tmp_path)

    def another(_: Query) -> None:
        with pytest.raises(ConfigurationError, match="another service"):
            process.run(SPARK, told)

    first = Query(another)
    assert ran(first, told, monkeypatch).sound
    assert ran(Query(), told, monkeypatch).sound


def test_who_is_asked_to_end_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is asked to stop finishes the current batch, however many rows are waiting (G11)."""
    told = options(tmp_path)
    stop = threading.Event()
    work: list[int] = []

    def batch(query: Query) -> None:
        query.works = True  # as Spark reports it while batches follow each other without a pause
        work.append(len(work))
        query.told.append(Progress(len(work) - 1, behind=100))
        if len(work) == 3:
            stop.set()

    def half(query: Query) -> None:
        query.works = True

    query = Query(batch, half, batch, batch, half, half, batch, *[batch] * 20)
    summary = ran(query, told, monkeypatch, stop=stop)
    assert (summary.batches, work, query.stopped) == (4, [0, 1, 2, 3], True)


def test_progress_is_asked_for_as_little_as_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is reported once, and the list of all reports is read only if a batch was missed (G11)."""

    def two(query: Query) -> None:
        query.told += [Progress(7), Progress(8)]

    def one(query: Query) -> None:
        query.told.append(Progress(9))

    def idle(query: Query) -> None:
        query.told.append(Progress(10, rows=0))

    def later(query: Query) -> None:
        query.told += [Progress(10), Progress(11), Progress(12, rows=0)]

    said: list[str] = []
    query = Query(two, lambda _: None, one, lambda _: None, idle, lambda _: None, later)
    assert ran(query, options(tmp_path), monkeypatch, say=said.append).batches == 5
    assert [line.split(":")[0] for line in said] == [f"batch {n}" for n in range(7, 12)]
    assert query.asked == 2


def test_nothing_unknown_is_reported_as_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions are evaluated for the time up to which the journal is known.

    Before the first batch, this is the time of the last run (G11).
    """
    told = options(tmp_path)
    save(told.state, ServiceState(frontier=NOW - 3000))
    seen: list[float] = []

    def found(_state: ServiceState, _options: StreamOptions, as_of: float) -> list[Any]:
        seen.append(as_of)
        return []

    monkeypatch.setattr(process, "conditions", found)

    def behind(query: Query) -> None:
        assert not (told.folder / "status.json").exists()
        query.told.append(Progress(1, behind=10))

    def level(query: Query) -> None:
        query.told.append(Progress(2))

    ran(Query(lambda _: None, behind, level), told, monkeypatch)
    assert seen == [NOW - 3000, NOW, NOW]


def test_a_batch_is_committed_during_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a commit replaces files during a check, the check is repeated with the new files (G11; fault L1)."""
    told = options(tmp_path)
    save(told.state, ServiceState(open="old", transitions=1))

    def found(state: ServiceState, *_: Any) -> list[Any]:
        if state.open == "old":
            save(told.state, ServiceState(open="new", transitions=2))
            raise FileNotFoundError
        return []

    monkeypatch.setattr(process, "conditions", found)
    assert ran(Query(), told, monkeypatch).transitions == 2


def test_losses_are_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost tasks, and differences from the ledger, are part of the summary (G11; law 1)."""
    told = options(tmp_path)
    gone = Gap(kind="reset", shard=0, run="", first=0, last=0, number=4, at=NOW)
    save(told.state, ServiceState(books={KEY: QueueCounts(published=4, expired=4)}, gaps=[gone]))
    summary = ran(Query(), told, monkeypatch)
    assert (summary.balanced, summary.lost, summary.sound) == (True, 4, False)
    assert "live tasks that were lost: 4" in summary.alerts[0]
    assert ran(Query(), told, monkeypatch).lost == 4
    save(
        told.state,
        ServiceState(books={KEY: QueueCounts(whole=False)}, differing={KEY: "published: 1 more"}),
    )
    summary = ran(Query(), told, monkeypatch)
    assert (summary.balanced, summary.sound) == (False, False)


def test_a_beginning_is_of_the_first_run(tmp_path: Path) -> None:
    """The start option applies to a query's first run only; later runs continue without a gap (G11; fault L1)."""
    asked: list[dict[str, str]] = []

    class Reader:
        def format(self, _: str) -> Reader:
            return self

        def options(self, **given: str) -> Reader:
            asked.append(given)
            raise KeyboardInterrupt

    class Spark:
        readStream = Reader()  # noqa: N815 - Spark's interface has this name
        conf = type("Conf", (), {"set": lambda *_: None})()

    told = options(tmp_path, source={"path": "x", "startingTimestamp": "2026-01-31"})
    for place in ("", "checkpoint/offsets/0", "state.json"):
        shutil.rmtree(told.checkpoint, ignore_errors=True)
        if place:
            (told.folder / place).parent.mkdir(parents=True, exist_ok=True)
            (told.folder / place).touch()
        with pytest.raises(KeyboardInterrupt):
            process._start(Spark(), told)  # type: ignore[arg-type]
    assert ["startingTimestamp" in one for one in asked] == [True, False, False]


def test_each_window_is_looked_at_once(tmp_path: Path) -> None:
    """If several windows end between two checks, each rise is reported once with its start and end (G11)."""
    told = options(tmp_path, failure_least=10)
    bad, good = WindowCounts(events={"retried": 30}), WindowCounts(events={"acked": 30})
    shares = [*[good] * 5, bad, *[good] * 5, bad, bad]
    state = ServiceState(windows={KEY: {HOUR + 60 * n: one for n, one in enumerate(shares)}})
    path = told.folder / "alerts.jsonl"

    def tell(as_of: float, state: ServiceState = state) -> list[str]:
        before = len(lines(told))
        Alerts(path).report(conditions(state, told, as_of), NOW)
        assert {kind for _, kind in lines(told)} <= {"failing"}
        return [phase for phase, _ in lines(told)[before:]]

    assert tell(HOUR + 359.0) == []
    assert tell(HOUR + 780.0) == ["start", "end", "start"]
    assert tell(HOUR + 780.0) == []
    again = ServiceState(windows=state.windows)
    check_windows(again, told, HOUR + 780.0)
    again.windows = {}
    assert tell(HOUR + 790.0, again) == []
    assert tell(HOUR + 840.0) == ["end"]
    assert tell(HOUR + 900.0) == []
    state.windows[KEY][HOUR + 900] = bad
    assert tell(HOUR + 1200.0) == ["start", "end"]
    assert state.checked == HOUR + 1140
