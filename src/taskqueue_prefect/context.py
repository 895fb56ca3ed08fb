"""The state of one event loop: its backend, settings and background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import SettingsConflict
from taskqueue_core.hooks import Hooks, load_plugins
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.loading import load_backend
from taskqueue_prefect.settings import PrefectSettings

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Log(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        # If the output is closed, as with ``--background``, Prefect's console raises SystemExit: ignore the exception.
        with contextlib.suppress(SystemExit):
            super().log(level, msg, *args, **more)


LOG = _Log(logging.getLogger("prefect.taskqueue"))
"""the logger of this package"""


def forward_logs() -> None:
    """Forward messages of the logger ``taskqueue`` to Prefect's logs, with their fields in the text. Idempotent."""
    ours = logging.getLogger("taskqueue")
    if not any(isinstance(handler, _Forward) for handler in ours.handlers):
        ours.addHandler(_Forward())
        ours.propagate = False
        ours.setLevel(logging.INFO)


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in record.__dict__.items() if name not in _USUAL}
        more = " ".join(f"{name}={value}" for name, value in fields.items())
        if LOG.isEnabledFor(record.levelno):
            text = f"{record.getMessage()}: {more}" if more else record.getMessage()
            LOG.log(record.levelno, "%s", text, exc_info=record.exc_info)


_CLOSE_TIMEOUT = 5.0
"""seconds that background tasks get to finish before they are cancelled"""
_MAX_KNOWN_QUEUES = 10_000
_SETTINGS_CHECK_SECONDS = 30.0
"""minimum seconds between two checks of whether a queue has settings"""


class Host:
    """The backend, settings and background tasks of one event loop. Creating a host does not access the store."""

    _hosts: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Host]] = WeakKeyDictionary()

    def __init__(self) -> None:
        """Read the settings and load the backend. Raises `ConfigurationError`."""
        core = load_settings(Settings)
        self.settings = load_settings(PrefectSettings)
        hooks = Hooks()
        load_plugins(hooks, allow=core.plugins_allow, deny=core.plugins_deny)
        self.name = core.backend
        self.backend = InstrumentedBackend(load_backend(core.backend), hooks)
        self.control = control_of(self.backend)
        self.serves = False
        """whether a server runs in this event loop"""
        self._checked_at: dict[str, float] = {}
        """time (monotonic clock) of the last check of each queue's settings"""
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    def of_this_loop(cls) -> Self:
        """Return the host of the running event loop, creating it if there is none. Raises `ConfigurationError`."""
        loop = asyncio.get_running_loop()
        host = cls._hosts.get(loop)
        if host is None:
            host = cls._hosts[loop] = cls()
        return host  # type: ignore[return-value]

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background until it ends or the host is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a background task of the task queue failed", exc_info=error)

    async def prepare(self, key: str) -> None:
        """Configure a queue if it has no settings yet. Do nothing if the queue was checked recently."""
        now = time.monotonic()
        if now - self._checked_at.get(key, -_SETTINGS_CHECK_SECONDS) < _SETTINGS_CHECK_SECONDS:
            return
        settings = await self.control.settings(key)
        if settings.version == 0:
            changes: dict[str, Any] = {
                "max_losses": self.settings.max_losses,
                "dedupe_window": self.settings.remember,
                "result_ttl": self.settings.remember,
            }
            if has(self.backend, Capability.FLOW):
                changes["capacity"] = self.settings.capacity or _stock_capacity()
            with contextlib.suppress(SettingsConflict):  # another replica has configured the queue
                await self.control.configure(key, settings.model_copy(update=changes))
        if len(self._checked_at) >= _MAX_KNOWN_QUEUES:
            self._checked_at.clear()
        self._checked_at[key] = now

    def forget(self) -> None:
        """Forget which queues have been checked, because the store may be empty after an outage."""
        self._checked_at.clear()

    async def aclose(self) -> None:
        """Wait a few seconds for background tasks, cancel those still running, and close the backend."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.backend.aclose()
        loop = asyncio.get_running_loop()
        if self._hosts.get(loop) is self:
            del self._hosts[loop]


def _stock_capacity() -> int:
    from prefect.settings import get_current_settings

    return int(get_current_settings().server.tasks.scheduling.max_scheduled_queue_size)
