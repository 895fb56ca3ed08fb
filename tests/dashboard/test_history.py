"""The history of the charts: what a row says, gaps, and how much is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from taskqueue_core.capabilities import Control, control_of
from taskqueue_core.concurrency import wait_forever
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_memory import MemoryBackend
from taskqueue_server.context.statistics import StatisticsReader
from taskqueue_server.dashboard import history
from taskqueue_server.dashboard.history import RANGES, Counts, HistoryRecorder, Resolution
from tests.dashboard.support import PAGE
from tests.dashboard.test_live import stream
from tests.server.support import http, running

_BOUNDS = (0.1, 1.0, 10.0)
_QUARTER, _DAY = RANGES["15m"], RANGES["24h"]
_GAP = [None] * 7


def _queue(key: str, **numbers: int) -> QueueStats:
    return QueueStats(key=key, ledger=Ledger(**numbers))


def _values(resolution: Resolution, *keys: str, seconds: float = 1e9) -> list[Sequence[Any]]:
    return [row[1:] for row in resolution.rows(keys or None, seconds)]


class TestRows:
    """U20: a row has the rates since the last row, the highest depths, and percentiles of the run times."""

    def test_of_a_queue_and_of_all(self) -> None:
        """U20: rates are differences of the store's counters; sums have no percentiles."""
        kept = Resolution(15, 3600, _BOUNDS)
        before: Counts = {"a": [5, 0, 0, 0]}
        after: Counts = {"a": [6, 0, 18, 1]}
        kept.add(0, [_queue("a", published=30), _queue("b")], before, late=False)
        kept.add(7, [_queue("a", published=30, waiting=9), _queue("b")], before, late=False)
        kept.add(
            15, [_queue("a", published=60, done=15, waiting=2), _queue("b")], after, late=False
        )
        kept.add(30, [_queue("a", published=60), _queue("b", in_flight=3)], after, late=False)
        assert _values(kept, "a") == [
            [2.0, 1.0, 9.0, 0.0, 0.0, 10.0, 10.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, None, None],
        ]
        assert (
            _values(kept)
            == _values(kept, "a", "b")
            == [
                [2.0, 1.0, 9.0, 0.0, 0.0, None, None],
                [0.0, 0.0, 0.0, 0.0, 3.0, None, None],
            ]
        )
        idle = [0.0, 0.0, 0.0, 0.0, 0.0, None, None]
        assert _values(kept, "b")[0] == _values(kept, "unknown")[0] == idle

    def test_the_overflow_bucket(self) -> None:
        """U20: a run time above the highest bound is shown as that bound."""
        kept = Resolution(15, 3600, _BOUNDS)
        for number in range(2):
            counts = {"a": [0, 0, 0, number]}
            kept.add(15 * number, [_queue("a", waiting=1)], counts, late=False)
        assert _values(kept, "a")[0][5:] == [10.0, 10.0]

    def test_a_gap(self) -> None:
        """U20: where nothing was measured there is an empty row, and no rate reaches across it."""
        kept = Resolution(15, 3600, _BOUNDS)
        for at in (0, 15):
            kept.add(at, [_queue("a", published=at)], {}, late=False)
        kept.add(600, [_queue("a", published=9000)], {}, late=True)
        kept.add(615, [_queue("a", published=9015)], {}, late=False)
        rates = [row[0] for row in _values(kept, "a")]
        assert rates == [1.0, None, 1.0]
        assert _values(kept, "a")[1] == _values(kept)[1] == _values(kept, "unknown")[1] == _GAP

    def test_only_the_range(self) -> None:
        """U20: a range shorter than what is kept has its rows only; ``newest`` limits them to the last ones."""
        kept = Resolution(15, 3600, _BOUNDS)
        for at in range(0, 3600, 15):
            kept.add(at, [_queue("a", published=at)], {}, late=False)
        assert len(list(kept.rows(None, _QUARTER.seconds))) == 61
        assert [row[0] for row in kept.rows(["a"], 3600, 2)] == [3570, 3585]


class TestBounds:
    """U20: the history is bounded, whatever the number of queues."""

    def test_rows(self) -> None:
        """U20: a resolution keeps as many rows as its range has steps, and at most twice as many in memory."""
        kept = Resolution(15, 150, _BOUNDS)
        for at in range(0, 1500, 15):
            kept.add(at, [_queue("a", published=at)], {}, late=False)
            assert len(kept._queues.get("a", kept._total)._values) <= 2 * 10 * 7
        assert [row[0] for row in kept.rows(["a"], 1e9)] == list(range(1350, 1500, 15))
        assert all(row[1] == 1.0 for row in kept.rows(["a"], 1e9))

    def test_queues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """U20: idle queues have no history of their own; of the others a limited number has; a deleted one's ends."""
        monkeypatch.setattr(history, "MAX_HISTORIES", 2)
        kept = Resolution(15, 60, _BOUNDS)
        busy = [_queue("idle"), *(_queue(f"q{number}", waiting=1) for number in range(3))]
        kept.add(0, busy, {}, late=False)
        kept.add(15, busy, {}, late=False)
        assert set(kept._queues) == {"q0", "q1"}
        assert _values(kept)[0][2] == 3.0
        for at in range(30, 180, 15):
            kept.add(at, busy[2:], {}, late=False)
        assert set(kept._queues) == {"q1", "q2"}


class TestRecorder:
    """U20: the server records while it runs, whether or not a page is open."""

    async def test_records(self) -> None:
        """U20, fault: an error of the store, and a pause of the machine, leave a gap; the counts are the store's."""
        backend, now = MemoryBackend(), 1000.0
        control: Control = control_of(backend)
        down = False

        class Flaky:
            stats = control.stats

            async def queues(self) -> tuple[str, ...]:
                if down:
                    raise BackendUnavailable("down")
                return await control.queues()

        reader = StatisticsReader(Flaky(), lambda: now)  # type: ignore[arg-type]
        recorder = HistoryRecorder(reader, dict, _BOUNDS)
        for step in range(6):
            await Queue(backend).publish("a", step)
            down = step == 3
            await recorder.record()
            now += 15
        rows = list(recorder.rows(["a"], _QUARTER))
        assert [row[3] for row in rows] == [2.0, 3.0, None, 6.0]
        now += 300
        await recorder.record()
        assert list(recorder.rows(["a"], _QUARTER))[-1][1:] == _GAP
        assert list(recorder.rows(["a"], _DAY)) == []
        await backend.aclose()

    async def test_a_page(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """U20: a page with a range has its rows and a link to each other range; an unknown range shows the live one."""
        recorders: list[HistoryRecorder] = []

        async def run(recorder: HistoryRecorder) -> None:
            recorders.append(recorder)
            await wait_forever()

        monkeypatch.setattr(HistoryRecorder, "run", run)
        async with running(prometheus="https://metrics.example/") as it:
            await it.publish("one")
            (recorder,) = recorders
            now = 0
            recorder._statistics = StatisticsReader(it.context.control, lambda: now)
            for now in range(0, 75, 15):  # noqa: B007 - the clock of the reader
                await recorder.record()
            async with stream(it, "queue&key=k&range=15m") as events:
                rows = (await anext(events))["rows"]
            assert [row[3] for row in rows] == [1.0] * 4
            assert [row[0] - rows[0][0] for row in rows] == [0, 15, 30, 45]
            async with http(it) as client:
                page = (await client.get("/queues/k?range=24h", headers=PAGE)).text
                live = (await client.get("/queues/k?range=x", headers=PAGE)).text
        assert 'href="?range=24h" aria-current="true"' in page
        assert "view=queue&amp;key=k&amp;range=24h" in page
        assert "https://metrics.example/graph?g0.expr=" in page
        assert 'href="?" aria-current="true"' in live
