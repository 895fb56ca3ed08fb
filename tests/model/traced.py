"""Chaos runs whose recorded script calls are compared with the specification at their end."""

from __future__ import annotations

from typing import Any, Self

from tests.chaos.flowing import Flowing
from tests.chaos.world import Outcome, World
from tests.model.replay import replay
from tests.model.tracing import TRACED, Call, install, traces


class TracedWorld(World):
    """World in which every process, including this one, runs scripts that record their calls."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.more[TRACED] = "1"
        self.calls: list[Call] = []
        """the calls of the first partition"""
        self.compared = self.fired = 0
        """number of calls that were compared, and of instants that were fired"""
        self._end = install()

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except BaseException:
            self._end()
            raise

    async def __aexit__(self, *error: object) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            self._end()

    async def judge(self) -> Outcome:
        """Run the checker, then compare all calls. Raises `Mismatch` if an answer differs from the specification's."""
        outcome = await super().judge()
        for number in range(self.credentials.get("partitions", 1)):
            calls = list(traces(self.redis, f"{{chaos:{number}}}"))
            self.calls = self.calls or calls
            replayed = replay(calls)
            self.compared += replayed.compared
            self.fired += replayed.fired
        return outcome


class TracedFlow(TracedWorld, Flowing):
    """The same for a run with workflows and schedules."""
