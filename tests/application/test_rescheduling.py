"""Another time for a published task, through its handle."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskqueue_core import InvalidInput, TaskDead, Tasks
from taskqueue_core.tasks import State
from tests.application.running import OpenWorld, working

tasks = Tasks()


@tasks.task
async def remind(text: str) -> str:
    """Return the text, unless it is empty."""
    if not text:
        raise ValueError("nothing to say")
    return text


async def test_a_task_runs_at_another_time(world: OpenWorld) -> None:
    """U6: a handle puts a task off or brings it forward, until the task runs; then it keeps its time."""
    async with world() as it, tasks.connect(it.backend):
        later = await remind.publish("later")
        sooner = await remind.using(delay=3600).publish("sooner")
        assert await later.reschedule(not_before=datetime.now(UTC) + timedelta(hours=1))
        assert await sooner.reschedule(delay=0)
        async with working(it.worker(tasks)):
            assert await sooner.result(timeout=30) == "sooner"
            status = await later.status()
            assert status is not None
            assert status.state is State.SCHEDULED
            assert await later.reschedule(delay=0)
            assert await later.result(timeout=30) == "later"
        assert not await later.reschedule(delay=5), "a done task was rescheduled"
        assert not await remind.handle("unknown").reschedule(delay=5)


@pytest.mark.parametrize("times", [{}, {"delay": 1, "not_before": 2}, {"delay": -1}])
async def test_one_time_is_needed(times: dict[str, Any]) -> None:
    """U6: no time, two times or a wrong one is an error that names the option."""
    async with tasks.connect("memory"):
        handle = await remind.publish("x")
        with pytest.raises(InvalidInput, match="delay"):
            await handle.reschedule(**times)


def test_from_code_without_an_event_loop() -> None:
    """U6: the blocking handle reschedules a task, too."""
    with tasks.connect_sync("memory"):
        handle = remind.publish_sync("x")
        assert handle.reschedule(delay=60)
        status = handle.status()
        assert status is not None
        assert status.state is State.SCHEDULED


async def test_a_dead_task_has_its_error(world: OpenWorld) -> None:
    """U6, U10: `TaskDead` has the reason, and the error and the traceback of the last failure."""
    async with world() as it, tasks.connect(it.backend):
        handle = await remind.using(max_attempts=1).publish("")
        async with working(it.worker(tasks)):
            with pytest.raises(TaskDead) as caught:
                await handle.result(timeout=30)
    dead = caught.value
    assert (dead.reason, dead.error) == ("max_retries_exceeded", "ValueError: nothing to say")
    assert dead.traceback is not None
    assert dead.traceback.endswith("ValueError: nothing to say\n")
    assert "in remind" in dead.traceback
    assert "taskqueue_worker" not in dead.traceback
