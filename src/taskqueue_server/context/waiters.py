"""Long polling: HTTP requests that wait for the end of a task. All of them share the same polls of the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from taskqueue_core.capabilities import Control
from taskqueue_core.concurrency import first_completed
from taskqueue_core.hooks import Hooks, hookimpl
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Expired
from taskqueue_server.problems import ProblemError

MAX_WAIT = 30
"""maximum number of seconds that a request may wait"""
MAX_WAITERS = 1000
"""maximum number of waiting requests of one server process"""
_PERIOD = 0.5
"""seconds between polls of the store, which detect tasks that ended on another server"""

_Name = tuple[str, str]


class ResultWaiters:
    """HTTP requests that wait for tasks to end.

    A wait ends at once if the task ends on this server, and after the next poll of the store if the task ends on
    another server. The store is polled only while requests wait.
    """

    def __init__(
        self,
        control: Control,
        hooks: Hooks,
        draining: asyncio.Event,
        *,
        most: int = MAX_WAITERS,
        period: float = _PERIOD,
    ) -> None:
        """Create waiters that poll the store with ``control``. All waiting requests return when ``draining`` is set."""
        self._control = control
        self._hooks = hooks
        self._draining = draining
        self._period = period
        self._waiting: dict[_Name, set[asyncio.Event]] = {}
        self._slots = LimitedSlots(most, "too_many_waiters", "requests wait for results")
        self._pending: set[_Name] = set()
        self._wakeup = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    async def wait(
        self,
        key: str,
        task_id: str,
        seconds: float,
        gone: Coroutine[Any, Any, None],
        client: str | None = None,
    ) -> None:
        """Wait until the task has ended, ``seconds`` have passed, the server begins to drain, or ``gone`` completes.

        ``gone`` completes when the client has left or lost its rights. Raises `ProblemError` if all slots are in use,
        or if requests of this ``client`` already use half of them.
        """
        try:
            if self._draining.is_set():
                return
            with self._slots.acquire(client):
                await self._wait((key, task_id), seconds, gone)
        finally:
            gone.close()

    async def _wait(self, name: _Name, seconds: float, gone: Coroutine[Any, Any, None]) -> None:
        ended = asyncio.Event()
        self._waiting.setdefault(name, set()).add(ended)
        if self._polling is None:
            self._hooks.register(self)
            self._polling = asyncio.create_task(self._poll_store())
        self._ended([name])  # the task may have ended before this request was registered
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await first_completed(ended.wait(), gone)
        finally:
            await self._leave(name, ended)

    async def _leave(self, name: _Name, ended: asyncio.Event) -> None:
        others = self._waiting[name]
        others.discard(ended)
        if not others:
            del self._waiting[name]
        if self._waiting or self._polling is None:
            return
        polling, self._polling = self._polling, None
        self._hooks.unregister(self)
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)

    @hookimpl
    def settled(self, deliveries: Sequence[Delivery]) -> None:
        """Schedule a check of the tasks that were settled on this server."""
        self._ended((delivery.task.key, delivery.task.id) for delivery in deliveries)

    @hookimpl
    def dead_lettered(self, delivery: Delivery) -> None:
        """Schedule a check of a task that became a dead letter on this server."""
        self._ended([(delivery.task.key, delivery.task.id)])

    @hookimpl
    def expired(self, tasks: Sequence[Expired]) -> None:
        """Schedule a check of the tasks that this server found expired."""
        self._ended((task.key, task.task_id) for task in tasks)

    def check_now(self, key: str, task_id: str) -> None:
        """Schedule a check of a task that this server has changed."""
        self._ended([(key, task_id)])

    def _ended(self, names: Iterable[_Name]) -> None:
        if waited_for := self._waiting.keys() & set(names):
            self._pending |= waited_for
            self._wakeup.set()

    async def _poll_store(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._period
        while not self._draining.is_set():
            try:
                async with asyncio.timeout_at(due):
                    await first_completed(self._wakeup.wait(), self._draining.wait())
            except TimeoutError:
                self._pending |= self._waiting.keys()
                due = loop.time() + self._period
            self._wakeup.clear()
            names, self._pending = self._pending, set()
            # A store that does not respond must not delay the drain.
            await first_completed(self._wake(names), self._draining.wait())
        self._wake_up(self._waiting.keys())

    async def _wake(self, names: set[_Name]) -> None:
        by_key: dict[str, list[str]] = {}
        for key, task_id in names:
            by_key.setdefault(key, []).append(task_id)
        for key, ids in by_key.items():
            for start in range(0, len(ids), LIMITS.batch):
                batch = ids[start : start + LIMITS.batch]
                # Ignore errors: each request reads the store again before it responds, and then reports the error.
                with contextlib.suppress(Exception):
                    matches = zip(batch, await self._control.statuses(key, *batch), strict=True)
                    self._wake_up(
                        (key, i) for i, status in matches if status is None or not status.state.live
                    )

    def _wake_up(self, names: Iterable[_Name]) -> None:
        for name in names:
            for ended in self._waiting.get(name, ()):
                ended.set()


class LimitedSlots:
    """A limited number of slots for concurrent requests. One named client may hold at most half of them."""

    def __init__(self, most: int, code: str, doing: str, retry_after: int = 1) -> None:
        """Create ``most`` slots. ``code`` and ``doing`` become part of the problem raised if no slot is free."""
        self._most = most
        self._code = code
        self._doing = doing
        self._headers = {"retry-after": str(retry_after)}
        self._per_client: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return self._per_client.total()

    @contextmanager
    def acquire(self, client: str | None) -> Iterator[None]:
        """Hold a slot during the block.

        Raises `ProblemError` if all slots are in use, or if the client already uses half of them.
        """
        if len(self) >= self._most:
            raise self._problem(503, f"the limit is reached: {self._most} {self._doing}")
        if client is not None and self._per_client[client] >= self._most // 2:
            raise self._problem(
                429, f"the limit is reached: {self._most // 2} {self._doing} with this token"
            )
        self._per_client[client] += 1
        try:
            yield
        finally:
            self._per_client[client] -= 1
            self._per_client += Counter()  # ``+=`` removes clients whose count is 0

    def _problem(self, status: int, detail: str) -> ProblemError:
        return ProblemError(status, self._code, detail, headers=self._headers)
