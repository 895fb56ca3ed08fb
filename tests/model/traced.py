"""A chaos run whose recorded script calls are compared with the specification at its end."""

from __future__ import annotations

from typing import Any, Self

from tests.chaos.world import Outcome, World
from tests.model.replay import Replay, replay
from tests.model.tracing import TRACED, Call, install, traces

_PARTITION = "{chaos:0}"


class TracedWorld(World):
    """World in which every process, including this one, runs scripts that record their calls."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.more[TRACED] = "1"
        self.calls: list[Call] = []
        self.replayed = Replay()
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
        self.calls = list(traces(self.redis, _PARTITION))
        self.replayed = replay(self.calls)
        return outcome
