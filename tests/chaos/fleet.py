"""Three servers and many workers; one server and one worker are killed every two seconds, and ledgers are compared."""

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
"""seconds between two pairs of kills"""
_AWAY = 0.3
"""seconds before a killed server is started again"""
_FIELD = re.compile(r'data-ledger-([a-z-]+)="(\d+)"')
_GROWING = ("published", "done")
"""counters of the ledger that never decrease; the other ones may change in either direction between two samples"""
_LIVE = frozenset({"waiting", "scheduled", "in_flight"})


def _settled(ledger: Ledger) -> dict[str, int]:
    """Return the counters of the ledger that do not concern live tasks."""
    return {
        name: count for name, count in msgspec.structs.asdict(ledger).items() if name not in _LIVE
    }


class Fleet(Replicas):
    """A run with servers, workers in processes of their own, and processes that simulate many workers each."""

    def __init__(
        self, folder: Path, shape: Shape, *, crowds: int, each: int, workers: int, **more: Any
    ) -> None:
        super().__init__(folder, shape, servers=3, workers=workers, **more)
        self._crowds = crowds
        self._each = each

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Tell each process with the role ``crowd`` how many workers it simulates."""
        more = {"crowd": self._each} if role == "crowd" else {}
        return super().setup(role, number) | more

    async def begin(self) -> None:
        """Start servers, crowds and workers; wait until all workers are connected; then start the producers."""
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
        """Kill one server and one worker every two seconds; return the number of such pairs."""
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
        """URLs of the servers that are running now."""
        present = [a.number for a in self.cast.of("server") if a.alive]
        return [f"http://127.0.0.1:{self._ports[number].port}" for number in present]

    async def end(self) -> None:
        """Stop the crowds before the workers, producers and servers."""
        present = [actor for actor in self.cast.of("crowd") if actor.alive]
        await asyncio.gather(*(self.cast.stop(actor) for actor in present))
        await super().end()


class Onlooker:
    """Repeatedly compares the ledger on each server's dashboard with the ledger in its API."""

    def __init__(self, fleet: Fleet) -> None:
        self.samples = 0
        self.equal = 0
        """number of samples during which the ledger did not change, so that dashboard and API had to agree"""
        self.faults: list[str] = []
        self._fleet = fleet
        self._last = Ledger()

    async def look(self, over: asyncio.Event) -> None:
        """Sample all running servers repeatedly until ``over`` is set."""
        while not over.is_set():
            for address in self._fleet.addresses:
                await self.sample(address)
            await asyncio.sleep(0.1)

    async def sample(self, address: str) -> bool:
        """Read a server's API, its dashboard, and its API again, and compare. Return False if it was not available."""
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
        # Servers are sampled one after the other; no counter may be lower than what an earlier sample reported.
        looks = (self._last, before, shown, after)
        self._last = after
        if not all(ledger.balanced for ledger in looks):
            self.faults.append(f"{address}: not balanced: {looks}")
        for one, two in itertools.pairwise(looks):
            if any(getattr(one, name) > getattr(two, name) for name in _GROWING):
                self.faults.append(f"{address}: went back: {looks}")
        if before == after:
            # Compare only counts of ended tasks: in between, a retry may have been scheduled and have become due.
            if _settled(shown) != _settled(before):
                self.faults.append(f"{address}: the dashboard shows {shown}, the API {before}")
            self.equal += 1

    async def _asked(self, client: httpx2.AsyncClient) -> Ledger | None:
        answer = await client.get("/v1/ledger")
        if answer.status_code == 503:  # the server has just started, or the store was slow
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
