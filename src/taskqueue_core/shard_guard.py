"""Checks that keep a process without the setting ``sharding`` from working on sharded queues."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    InvalidInput,
    SettingsConflict,
)
from taskqueue_core.tasks import Confirmation, Refusal

MARKER = "_taskqueue.sharding"
"""name of an internal queue; the version of its settings is above 0 if a queue of the store ever had several shards"""
GENERATION = re.compile(r"shards@(\d{1,9})x(\d{1,4})")
"""format of the setting ``moved_to`` of a queue or shard that was replaced by a later generation of shards"""
_NEEDED = "need TASKQUEUE_SHARDING=true in every server, worker and publisher"
_OTHER_SECONDS = 1.0
_log = logging.getLogger("taskqueue.sharding")


async def write_marker(control: Control) -> None:
    """Record in the store that a queue has several shards. Idempotent."""
    if not (await control.settings(MARKER)).version:
        with contextlib.suppress(SettingsConflict):  # another process has written the marker
            await control.configure(MARKER, QueueSettings())


class ShardGuard:
    """Checks for sharded queues, in a process without the setting ``sharding``."""

    def __init__(self, control: Control, *others: Control) -> None:
        """Create a guard that looks for `MARKER` in the store of ``control`` and, if available, those of ``others``."""
        self._control = control
        self._others = others
        self.checked = False
        """whether a check has found that the store has no sharded queue"""
        self.fault: ConfigurationError | None = None
        """the error to report if maintenance has found that another process has sharded a queue; otherwise ``None``"""

    async def check(self) -> None:
        """Raise `ConfigurationError` if the store has a sharded queue."""
        if await self._is_marked():
            raise ConfigurationError(f"the store has queues with shards, which {_NEEDED}")
        self.checked = True

    async def check_again(self) -> None:
        """Look for `MARKER` again. When it is found for the first time, log an error and set `fault`."""
        if self.fault is None and await self._is_marked():
            self.fault = ConfigurationError(f"the store has queues with shards, which {_NEEDED}")
            _log.error("a queue was sharded, but sharding is off in this process: %s", self.fault)

    async def check_refused(self, confirmations: Iterable[Confirmation]) -> None:
        """Raise `ConfigurationError` if a task was refused because its queue has moved to shards."""
        for key in {answer.key for answer in confirmations if answer.code is Refusal.MOVED}:
            moved_to = (await self._control.settings(key)).moved_to
            if moved_to is not None and GENERATION.fullmatch(moved_to):
                raise ConfigurationError(f"queue {key!r} has shards, which {_NEEDED}")

    async def _is_marked(self) -> bool:
        if (await self._control.settings(MARKER)).version:
            return True
        for control in self._others:
            with contextlib.suppress(BackendUnavailable, TimeoutError):
                async with asyncio.timeout(_OTHER_SECONDS):
                    if (await control.settings(MARKER)).version:
                        return True
        return False


def reject_shards(key: str, settings: QueueSettings) -> None:
    """Raise `InvalidInput` for settings with several shards. Used in a process without the setting ``sharding``."""
    if settings.shards > 1:
        allowed = f"only 1 for queue {key!r}, because shards {_NEEDED}"
        raise InvalidInput("shards", str(settings.shards), allowed)
