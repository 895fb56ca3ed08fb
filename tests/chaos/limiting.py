"""Limits of the flow in a run: set as an operator sets them, and noted in the form that the rules R10 to R12 expect."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.operating import change_settings
from tests.chaos.history import What

if TYPE_CHECKING:
    from tests.chaos.world import World

__all__ = ["limit", "pause", "resume"]

_AGAIN = 0.03


async def limit(world: World, key: str, **changes: Any) -> None:
    """Change the limits of a queue, until the store has confirmed it. Until then the log says that none is known."""
    for name in _limits(QueueSettings()):
        world.log.note(What.SETTINGS, key=key, name=name)
    settings = await _change(world, key, **changes)
    for name, value in _limits(settings).items():
        world.log.note(What.SETTINGS, key=key, name=name, value=value)


def _limits(settings: QueueSettings) -> dict[str, float | None]:
    rate = settings.rate_limit
    return {
        "limit": settings.max_inflight or None,
        "rate": rate.max_tokens / rate.period if rate else None,
        "burst": rate.max_tokens if rate else None,
    }


async def pause(world: World, key: str) -> None:
    """Pause a queue, until the store has confirmed it."""
    world.log.note(What.PAUSE, key=key)
    await _change(world, key, paused=True)
    world.log.note(What.PAUSED, key=key, store_at=time.time())  # the store has this machine's clock


async def resume(world: World, key: str) -> None:
    """Let a queue go on, until the store has confirmed it."""
    world.log.note(What.RESUME, key=key)
    await _change(world, key, paused=False)


async def _change(world: World, key: str, **changes: Any) -> QueueSettings:
    while True:
        try:
            return await change_settings(
                world.control, key, lambda found: found.model_copy(update=changes)
            )
        except BackendUnavailable:  # done or not, it is the same to do it again
            await asyncio.sleep(_AGAIN)
