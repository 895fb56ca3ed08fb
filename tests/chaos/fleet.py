"""Three servers and many workers, of which one of each is killed every two seconds, and somebody who looks on."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from taskqueue_core.tasks import Ledger
from tests.chaos.replicas import Replicas
from tests.chaos.world import Shape

EVERY = 2.0
"""seconds from one pair of kills to the next"""
_AWAY = 0.3
"""seconds for which a killed server is gone"""
_FIELD = re.compile(r'data-ledger-([a-z-]+)="(\d+)"')
_GROWING = ("published", "done")
"""what never shrinks; of the other counts nothing can be said from one look to the next"""
_LIVE = frozenset({"waiting", "scheduled", "in_flight"})


def _settled(ledger: Ledger) -> dict[str, int]:
    """Return the counts of tasks that have ended, and of all."""
    return {
        name: count for name, count in msgspec.structs.asdict(ledger).items() if name not in _LIVE
    }


class Fleet(Replicas):
    """Servers, workers in processes of their own, and crowds of light ones."""

    def __init__(
        self, folder: Path, shape: Shape, *, crowds: int, each: int, workers: int, **more: Any
    ) -> None:
        super().__init__(folder, shape, servers=3, workers=workers, **more)
        self._crowds = crowds
        self._each = each

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """A crowd is told how many it is."""
        more = {"crowd": self._each} if role == "crowd" else {}
        return super().setup(role, number) | more

    async def begin(self) -> None:
        """Start the servers and the crowds, wait until all workers are known, then start the producers."""
        self.phase("load")
        for number in range(len(self._ports)):
            await self.start("server", number)
        for actor in self.cast.of("server"):
            await self.present(actor)
        for number in range(self._crowds):
            await self.start("crowd", number)
        for number in range(self.workers):
            await self.start("worker", number)
        await self.until(self._complete, "all workers are connected", seconds=30)
        for number in range(self.shape.producers):
            await self.start("producer", number)

    async def _complete(self) -> bool:
        expected = self._crowds * self._each + self.workers
        return len(await self.control.workers()) >= expected

    async def rage(self, seconds: float) -> int:
        """Kill one server and one worker every two seconds. Return how many pairs."""
        chance = random.Random(self.seed)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        pairs = 0
        while (due := loop.time() + EVERY) <= end + 0.1:
            await asyncio.gather(
                self.inflict("kill", "server", chance.randrange(len(self._ports)), _AWAY),
                self.inflict("kill", "worker", chance.randrange(self.workers)),
            )
            pairs += 1
            await asyncio.sleep(max(0.0, due - loop.time()))
        return pairs

    @property
    def addresses(self) -> list[str]:
        """Where the servers listen that are there now."""
        present = [a.number for a in self.cast.of("server") if a.alive]
        return [f"http://127.0.0.1:{self._ports[number].port}" for number in present]

    async def end(self) -> None:
        """End the crowds too, before the servers."""
        present = [actor for actor in self.cast.of("crowd") if actor.alive]
        await asyncio.gather(*(self.cast.stop(actor) for actor in present))
        await super().end()


class Onlooker:
    """Compares what every server's dashboard shows with what every server's API says, again and again."""

    def __init__(self, fleet: Fleet) -> None:
        self.samples = 0
        self.equal = 0
        """samples in which nothing moved meanwhile, so that they must be the same and are"""
        self.faults: list[str] = []
        self._fleet = fleet
        self._last = Ledger()

    async def look(self, over: asyncio.Event) -> None:
        """Look until the end."""
        while not over.is_set():
            for address in self._fleet.addresses:
                await self.sample(address)
            await asyncio.sleep(0.1)

    async def sample(self, address: str) -> bool:
        """Ask one server: its API, its dashboard, and its API again. False if it went meanwhile."""
        try:
            async with httpx2.AsyncClient(base_url=address, trust_env=False, timeout=10) as client:
                before = await self._asked(client)
                shown = await self._shown(client)
                after = await self._asked(client)
        except httpx2.HTTPError:
            return False
        if before is None or shown is None or after is None:
            return False
        self.samples += 1
        self._compare(address, before, shown, after)
        return True

    def _compare(self, address: str, before: Ledger, shown: Ledger, after: Ledger) -> None:
        # Servers are asked one after the other, so what one has said the next one may not take back.
        looks = (self._last, before, shown, after)
        self._last = after
        if not all(ledger.balanced for ledger in looks):
            self.faults.append(f"{address}: not balanced: {looks}")
        for one, two in itertools.pairwise(looks):
            if any(getattr(one, name) > getattr(two, name) for name in _GROWING):
                self.faults.append(f"{address}: went back: {looks}")
        if before == after:
            # A retry may have been scheduled and have become due again in between.
            if _settled(shown) != _settled(before):
                self.faults.append(f"{address}: the dashboard shows {shown}, the API {before}")
            self.equal += 1

    async def _asked(self, client: httpx2.AsyncClient) -> Ledger | None:
        answer = await client.get("/v1/ledger")
        if answer.status_code == 503:  # it has just been started, or the store was slow
            return None
        found = answer.raise_for_status().json()
        return Ledger(**{name: found[name] for name in Ledger.__struct_fields__})

    async def _shown(self, client: httpx2.AsyncClient) -> Ledger | None:
        answer = await client.get("/", headers={"accept": "text/html"})
        if answer.status_code == 503:
            return None
        fields = _FIELD.findall(answer.raise_for_status().text)
        found = {name.replace("-", "_"): int(number) for name, number in fields}
        return Ledger(**{name: found[name] for name in Ledger.__struct_fields__})
