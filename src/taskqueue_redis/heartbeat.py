"""Heartbeats, sent from a thread, so that consumers keep their leases while a handler blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

from taskqueue_core.errors import TaskQueueError
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.scripts.receipts import Consumer
from taskqueue_redis.scripts.runner import ScriptRunner

_BEATS = 3
"""number of heartbeats during one lease"""
_log = logging.getLogger("taskqueue.redis")


class Heartbeat:
    """Renews the leases of consumers, three times within the duration of a lease."""

    def __init__(self, settings: RedisSettings) -> None:
        """Create a heartbeat without a thread; the first call of `add` starts the thread.

        If a consumer's lease expires, its `expire` is called in the event loop of the first call of `add`. The thread
        ends when that loop is closed.
        """
        # Short timeouts leave time for a second attempt within the lease if an answer is lost.
        patience = settings.lease / 3
        names = ("answer_timeout", "connect_timeout", "operation_timeout")
        timeouts = {name: min(getattr(settings, name), patience) for name in names}
        self._settings = settings.model_copy(update=timeouts)
        self._consumers: dict[str, dict[str, Consumer]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, consumer: Consumer, partition: str) -> None:
        """Send heartbeats for a consumer in a partition."""
        with self._lock:
            if self._owner is None or self._owner.is_closed():
                self._owner, self._consumers = asyncio.get_running_loop(), {}
            self._consumers.setdefault(partition, {})[consumer.token] = consumer
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="taskqueue-heartbeat", daemon=True
                )
                self._thread.start()

    def remove(self, token: str) -> None:
        """Stop sending heartbeats for a consumer."""
        with self._lock:
            for consumers in self._consumers.values():
                consumers.pop(token, None)

    async def aclose(self) -> None:
        """End the thread. A heartbeat in progress is cancelled, because the store may be unavailable."""
        with self._lock:
            self._closed = True
            thread, loop, beating = self._thread, self._loop, self._beating
        if thread is None:
            return
        if loop is not None and beating is not None:
            with contextlib.suppress(RuntimeError):  # the thread's event loop has ended
                loop.call_soon_threadsafe(beating.cancel)
        await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._beat_on())

    async def _beat_on(self) -> None:
        with self._lock:
            self._loop, self._beating = asyncio.get_running_loop(), asyncio.current_task()
            if self._closed:
                return
        client = RedisClient(self._settings)
        scripts = ScriptRunner(client)
        try:
            usual = pause = self._settings.lease / _BEATS
            while True:
                await asyncio.sleep(pause)
                pause = usual
                with self._lock:
                    if self._owner is None or self._owner.is_closed():
                        self._thread = None  # no code is left that could settle the deliveries
                        return
                    consumers = {name: dict(each) for name, each in self._consumers.items()}
                beats = (self._beat(scripts, *pair) for pair in consumers.items())
                if not all(await asyncio.gather(*beats)):
                    pause /= 10  # retry soon, because the leases may expire
        finally:
            await client.aclose()

    async def _beat(
        self, scripts: ScriptRunner, partition: str, consumers: dict[str, Consumer]
    ) -> bool:
        if not consumers:
            return True
        try:
            gone = await scripts.run("beat", partition, *consumers)
        except TaskQueueError as error:
            _log.warning("could not send a heartbeat (%s)", type(error.__cause__ or error).__name__)
            return False
        except Exception:  # noqa: BLE001 - no error may end the thread, because the leases would expire
            _log.exception("could not send a heartbeat")
            return False
        for token in map(bytes.decode, gone):
            self.remove(token)
            if self._owner is not None:
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    self._owner.call_soon_threadsafe(consumers[token].expire, token)
        return True
