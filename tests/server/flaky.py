"""Memory backends for tests of outages: a test can make their store unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Health
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock

VERBS = ("receive", "ack", "redeliver", "dead_letter", "adopt", "close")


class Flaky(MemoryBackend):
    """A memory backend whose calls, also waiting receives, raise `BackendUnavailable` while ``down`` is set.

    The next ``lost`` acks take effect, but their responses are lost.
    """

    def __init__(self, slowness: float = 0.0) -> None:
        super().__init__(clock=LoopClock())
        self.slowness = slowness
        self.down = asyncio.Event()
        self.lost = 0
        self.calls: list[str] = []

    def subscribe(self, keys: Iterable[str], consumer: str) -> Any:
        """Return a subscription whose calls fail while the store is unavailable."""
        subscription = super().subscribe(keys, consumer)
        for verb in VERBS:
            setattr(subscription, verb, self._guarded(verb, getattr(subscription, verb)))
        return subscription

    async def health(self) -> Health:
        """Return the health of the backend, which is bad while the store is unavailable."""
        if self.down.is_set():
            return Health(ok=False, backend="memory")
        return await super().health()

    def _guarded(
        self, verb: str, call: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(verb)
            if self.down.is_set():
                raise BackendUnavailable("store unavailable")
            if verb == "ack":
                await asyncio.sleep(self.slowness)
            running = asyncio.ensure_future(call(*args, **kwargs))
            waiting = [running, asyncio.ensure_future(self.down.wait())]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    raise BackendUnavailable("store unavailable")
                if verb == "ack" and self.lost:
                    self.lost -= 1
                    raise BackendUnavailable("the response was lost")
                return running.result()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

        return guarded


class Plain(MemoryBackend):
    """A memory backend that has only the capabilities which the server requires."""

    capabilities = Capabilities(names=frozenset({Capability.DEAD_LETTERS, Capability.CONTROL}))
