"""Waiting for the ends of tasks. All waits of one connection share their polls of the store."""

from __future__ import annotations

import asyncio
import contextlib

from taskqueue_core.capabilities import Control, LongPolling
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State, TaskStatus

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.01, 0.5, 1.5
"""seconds between two polls for a task: the first pause, the longest one, and the factor from one to the next"""
_LONG_POLLS = 8
"""maximum number of concurrent long polls, which take connections away from other calls"""
_LONG_POLL_SECONDS = 20.0


class _Wait:
    """One call of `TaskEnds.wait`."""

    def __init__(self, redrive: bool, now: float) -> None:  # noqa: FBT001 - private
        self.answer: asyncio.Future[TaskStatus | None] = asyncio.get_running_loop().create_future()
        self.redrive = redrive
        self.pause = _FIRST_PAUSE
        self.due = now

    def is_over(self, status: TaskStatus | None) -> bool:
        return has_ended(status, wait_for_redrive=self.redrive)


class TaskEnds:
    """Waits for the ends of tasks, on one connection."""

    def __init__(self, control: Control) -> None:
        """Create it without waits. It polls ``control`` only while something waits."""
        self._control = control
        self._waits: dict[tuple[str, str], list[_Wait]] = {}
        self._long_polls = 0
        self._joined = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    async def wait(
        self, key: str, task_id: str, *, wait_for_redrive: bool = False
    ) -> TaskStatus | None:
        """Return the status of a task once it has ended; ``None`` if the task is unknown.

        With ``wait_for_redrive``, a dead letter has not ended. Raises the errors of the store.
        """
        control = self._control
        if (
            isinstance(control, LongPolling)
            and not wait_for_redrive
            and self._long_polls < _LONG_POLLS
        ):
            self._long_polls += 1
            try:
                # A server that has too many waiting requests refuses this one, but not a poll.
                with contextlib.suppress(BackendUnavailable):
                    while True:
                        status = await control.wait_for_end(key, task_id, _LONG_POLL_SECONDS)
                        if has_ended(status):
                            return status
            finally:
                self._long_polls -= 1
        wait = _Wait(wait_for_redrive, asyncio.get_running_loop().time())
        self._waits.setdefault((key, task_id), []).append(wait)
        self._joined.set()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            return await wait.answer
        finally:
            await self._leave((key, task_id), wait)

    async def _leave(self, name: tuple[str, str], wait: _Wait) -> None:
        waits = self._waits[name]
        waits.remove(wait)
        if not waits:
            del self._waits[name]
        if self._waits or self._polling is None:
            return
        polling, self._polling = self._polling, None
        polling.cancel()
        await asyncio.wait([polling])

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._joined.clear()
            # Tasks whose polls are due soon after one another are looked up together.
            soon = loop.time() + _FIRST_PAUSE
            due: dict[str, dict[str, list[_Wait]]] = {}
            for (key, task_id), waits in self._waits.items():
                if any(wait.due <= soon and not wait.answer.done() for wait in waits):
                    due.setdefault(key, {})[task_id] = list(waits)
            for key, by_id in due.items():
                await self._look_up(key, by_id)
            nearest = min(
                (
                    wait.due
                    for waits in self._waits.values()
                    for wait in waits
                    if not wait.answer.done()
                ),
                default=loop.time() + _LONGEST_PAUSE,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(nearest):
                    await self._joined.wait()

    async def _look_up(self, key: str, by_id: dict[str, list[_Wait]]) -> None:
        loop = asyncio.get_running_loop()
        ids = list(by_id)
        for start in range(0, len(ids), LIMITS.batch):
            batch = ids[start : start + LIMITS.batch]
            waits = [wait for task_id in batch for wait in by_id[task_id]]
            try:
                statuses = await self._control.statuses(key, *batch)
            except Exception as error:  # noqa: BLE001 - each of the waits raises it
                for wait in waits:
                    if not wait.answer.done():
                        wait.answer.set_exception(error)
                continue
            now = loop.time()
            for task_id, status in zip(batch, statuses, strict=True):
                for wait in by_id[task_id]:
                    if not wait.answer.done() and wait.is_over(status):
                        wait.answer.set_result(status)
                    wait.due, wait.pause = (
                        now + wait.pause,
                        min(wait.pause * _GROWTH, _LONGEST_PAUSE),
                    )


def has_ended(status: TaskStatus | None, *, wait_for_redrive: bool = False) -> bool:
    """Return whether there is nothing to wait for. ``status`` is ``None`` if the task is unknown."""
    if status is None:
        return True
    return not status.state.live and not (wait_for_redrive and status.state is State.DEAD)
