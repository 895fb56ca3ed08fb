"""What plugins and metrics observe of schedules."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from taskqueue_core import Queue, Schedule, TaskTemplate
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.firing import fire_due
from taskqueue_core.hooks import Hooks, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.schedules import Every
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.metrics.process_metrics import ProcessMetrics

START = 1_000_000_000.0


class Observer:
    """A plugin that notes what it observes of schedules."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str, str, int]] = []
        self.published_ids: list[str] = []

    @hookimpl
    def schedule_skipped(self, key: str, name: str, reason: str, count: int) -> None:
        """Note a skip."""
        self.skipped.append((key, name, reason, count))

    @hookimpl
    def published(self, tasks: Sequence[Task]) -> None:
        """Note the ids of published tasks."""
        self.published_ids += [task.id for task in tasks]


async def test_skipped_instants_are_observed_and_counted() -> None:
    """U13: missed and late instants, an overlap, and what a queue refused, but not while it is tried again."""
    clock, hooks, observer = ManualClock(START), Hooks(), Observer()
    registry = CollectorRegistry()
    inner = MemoryBackend(clock=clock)
    backend = InstrumentedBackend(inner, hooks)
    hooks.register(observer)
    hooks.register(ProcessMetrics(registry, clock.now))

    def counted(reason: str) -> float | None:
        return registry.get_sample_value("taskqueue_schedule_skipped_total", {"reason": reason})

    queue = Queue(backend)
    await queue.schedules.put(Schedule("s", Every(60), TaskTemplate.of("k"), late=300))
    await clock.advance(640)  # instants at 20, 80, ..., 620 seconds
    await fire_due(backend.schedules, set())
    assert observer.skipped == [("k", "s", "late", 6), ("k", "s", "missed", 4)]
    assert (counted("late"), counted("missed")) == (6, 4)
    assert len(observer.published_ids) == 1
    await clock.advance(60)
    await fire_due(backend.schedules, set())
    assert observer.skipped[2:] == [("k", "s", "overlap", 1)]
    assert counted("overlap") == 1
    await queue.schedules.trigger("s")  # an overlap of what an operator asked for is an answer
    await inner.control.purge("k")
    await inner.control.configure("k", QueueSettings(intake_paused=True))
    await clock.advance(60)
    await fire_due(backend.schedules, set())
    assert len(observer.skipped) == 3
    await clock.advance(240)  # refused at first, then not tried
    await inner.control.configure("k", QueueSettings(version=1))
    await fire_due(backend.schedules, set())
    assert observer.skipped[3:] == [("k", "s", "intake_paused", 1), ("k", "s", "missed", 3)]
    assert counted("intake_paused") == 1
    await backend.aclose()
