"""The generations of sharded queues, as the settings in the store tell them: each closed place says what follows it."""

from __future__ import annotations

import asyncio
from collections.abc import KeysView

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.sharding.names import FIRST, Generation, Shard
from taskqueue_core.together import together

__all__ = ["REMEMBERED", "Chains"]

REMEMBERED = 2.0
"""seconds for which a chain is taken for whole; who is refused at its end reads it again at once"""
_OF_THE_PLACE = ("version", "moved_to", "shards")


class Chains:
    """What this process knows of them. Places are closed for good, so a chain only grows."""

    def __init__(self, control: Control) -> None:
        """Read through ``control``."""
        self._control = control
        self._known: dict[str, tuple[Generation, ...]] = {}
        self._looked_at = -REMEMBERED
        self._looking = asyncio.Lock()
        self._closed: set[str] = set()

    @property
    def sharded(self) -> KeysView[str]:
        """The queues whose number of shards was changed, as far as this process has heard."""
        return self._known.keys()

    def known(self, key: str) -> tuple[Generation, ...]:
        """Return the generations of a queue that this process has heard of, the oldest first."""
        return self._known.get(key, (FIRST,))

    async def look(self) -> None:
        """Hear of what other processes have sharded, with one question for all queues every other second."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now < self._looked_at + REMEMBERED:
                return
            names = await self._control.queues()
            self._looked_at = now
            behind: set[str] = set()
            for name in names:
                shard = Shard.read(name)
                if shard is not None and shard.generation.number > self.known(shard.key)[-1].number:
                    behind.add(shard.key)
            await together(self.read(key) for key in behind)

    async def read(self, key: str) -> tuple[Generation, ...]:
        """Read the generations of a queue from the settings."""
        chain = self.known(key)
        while following := await self.after(chain[-1].place(key, 0)):
            chain = (*chain, following)
        if len(chain) > len(self.known(key)):
            self._known[key] = chain
        return self.known(key)

    async def after(self, place: str) -> Generation | None:
        """Return the generation that follows a place that is closed."""
        following = Generation.read((await self._control.settings(place)).moved_to)
        if following is not None:
            self._closed.add(place)
        return following

    async def demand_closed(self, place: str, following: Generation) -> None:
        """See to it that a place of the generation before takes nothing in any more."""
        if place not in self._closed:
            await self.close(place, following)

    async def close(self, place: str, following: Generation) -> Generation:
        """Close a place for good; return what follows it, which somebody else may have decided before."""

        def edit(found: QueueSettings) -> QueueSettings:
            if Generation.read(found.moved_to) is not None:
                return found
            return found.model_copy(update={"moved_to": following.word})

        told = await change_settings(self._control, place, edit)
        self._closed.add(place)
        return Generation.read(told.moved_to) or following

    async def succeed(self, key: str, shards: int, settings: QueueSettings) -> None:
        """Have a queue go on with another number of shards.

        The first shard of the present ones is closed first: what it says is what follows, whoever else tries the same.
        """
        while (chain := await self.read(key))[-1].shards != shards:
            last, following = chain[-1], Generation(chain[-1].number + 1, shards)
            await together(self.copy(name, settings, following) for name in following.places(key))
            following = await self.close(last.place(key, 0), following)
            await self.close_all(key, last, following)

    async def close_all(self, key: str, generation: Generation, following: Generation) -> None:
        """Close every shard of a generation."""
        await together(self.demand_closed(name, following) for name in generation.places(key))

    async def copy(self, place: str, settings: QueueSettings, generation: Generation) -> None:
        """Give a shard the settings of its queue; where it goes on from there, and its version, are its own."""
        moved = settings.moved_to if Generation.read(settings.moved_to) is None else None

        def edit(found: QueueSettings) -> QueueSettings:
            closed = Generation.read(found.moved_to) is not None
            own: dict[str, object] = {"version": found.version, "shards": 1}
            own["moved_to"] = found.moved_to if closed else moved
            return settings.model_copy(update=own)

        assert generation.number  # noqa: S101 - the first one is the queue itself
        await change_settings(self._control, place, edit)
        if not (await self._control.settings(place)).version:  # so that others find it by its name
            await self._control.configure(place, settings.model_copy(update={
                "version": 0, "shards": 1, "moved_to": moved,
            }))  # fmt: skip
