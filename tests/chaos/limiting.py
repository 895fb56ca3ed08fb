"""Changes limits, order and pauses of a queue as an operator does, and records them for the rules."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue_settings import change_settings
from tests.chaos.history import What

if TYPE_CHECKING:
    from tests.chaos.world import World

_AGAIN = 0.03
_OF_FAIR = ("weights", "tenant_capacity", "tenant_max_inflight", "tenant_rate_limit")


async def limit(world: World, key: str, **changes: Any) -> None:
    """Change the limits of a queue until the store confirms it. Meanwhile the log says that the limits are unknown."""
    for name in _limits(QueueSettings()):
        world.log.note(What.SETTINGS, key=key, name=name)
    settings = await _change(world, key, **changes)
    for tenant, weight in settings.weights.items():
        world.log.note(What.SETTINGS, key=key, name="weight", target=tenant, value=weight)
    for name, value in _limits(settings).items():
        world.log.note(What.SETTINGS, key=key, name=name, value=value)


def _limits(settings: QueueSettings) -> dict[str, float | None]:
    rate, each = settings.rate_limit, settings.tenant_rate_limit
    return {
        "limit": settings.max_inflight or None,
        "rate": rate.max_tokens / rate.period if rate else None,
        "burst": rate.max_tokens if rate else None,
        "tenant_limit": settings.tenant_max_inflight or None,
        "tenant_rate": each.max_tokens / each.period if each else None,
        "tenant_burst": each.max_tokens if each else None,
        "fair": 1.0 if settings.order is Order.FAIR else None,
        "floor": settings.floor_share or None,
        "max_processing": settings.max_processing_time,
        "shards": settings.shards if settings.shards > 1 else None,
    }


async def swap(world: World, key: str) -> None:
    """Switch a queue between fair and FIFO order; settings that only fair order allows are reset."""
    settings = await _change(world, key)
    unfair = {name: QueueSettings.model_fields[name].default for name in _OF_FAIR}
    other = (
        {"order": Order.FAIR} if settings.order is Order.FIFO else {"order": Order.FIFO, **unfair}
    )
    await limit(world, key, **other)


async def pause(world: World, key: str) -> None:
    """Pause a queue; return when the store has confirmed it."""
    world.log.note(What.PAUSE, key=key)
    await _change(world, key, paused=True)
    world.log.note(What.PAUSED, key=key, store_at=time.time())  # same clock as the store


async def resume(world: World, key: str) -> None:
    """Resume a paused queue; return when the store has confirmed it."""
    world.log.note(What.RESUME, key=key)
    await _change(world, key, paused=False)


async def _change(world: World, key: str, **changes: Any) -> QueueSettings:
    """Change settings of a queue, or only read them if there are no changes; repeat until the store answers."""
    while True:
        try:
            if not changes:
                return await world.control.settings(key)
            return await change_settings(
                world.control, key, lambda found: found.model_copy(update=changes)
            )
        except BackendUnavailable:  # repeating the change is harmless
            await asyncio.sleep(_AGAIN)
