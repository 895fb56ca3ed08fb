"""A desk for tests: what takes jobs in and keeps slots, without the dispatcher around it; and stores that fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Endpoint, Seen, SlotPool, slots_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry
from tests.dispatch.patience import until

URL = "http://127.0.0.1:9/generate"
SPELLINGS = (
    "flux",
    "meta-llama/Llama-3.1-8B-Instruct",
    "a-b-c",
    "{curly}",
    "two words and a blank",
    "üñïçødé 模型",
    "-leading",
    "...",
    "=41~",
    "%2F..%2Fetc",
    "x" * 200,
    "模" * 200,
)
"""names of models"""


def settings(**values: Any) -> DispatchSettings:
    """Return settings of these values alone."""
    return DispatchSettings(_env_file=None, **values)


async def registry_of(backend: Backend, **values: Any) -> ModelRegistry:
    """Return a registry that has looked, as that of a process of its own."""
    registry = ModelRegistry(backend, settings(**values))
    await registry.refresh()
    return registry


async def well(backend: Backend, model: str, server: str) -> None:
    """Have an endpoint be healthy."""
    await slots_of(backend).reconcile(model, server, Seen(active=0), settled=0)


async def free(pool: SlotPool, model: str) -> int:
    """Count the free slots of a model."""
    return sum(info.free for info in (await pool.inspect(model)).endpoints)


class Failing:
    """Stands before a part of a backend; its calls fail while it is ``down``, before or ``after`` they happened."""

    def __init__(self, part: object) -> None:
        """Start well."""
        self._part = part
        self.down = False
        self.after = False
        self.calls: Counter[str] = Counter()
        self.held: set[str] = set()
        """what waits, once it has happened, until this lacks it"""

    def put(self, name: str, call: Any) -> None:
        """Have this called in place of a method."""
        setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        """Return a method that may fail, or what is none."""
        found = getattr(self._part, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.down and not self.after:
                raise BackendUnavailable("out of reach")
            told = await found(*args, **kwargs)
            if self.down:
                raise BackendUnavailable("out of reach")
            await until(lambda: name not in self.held, "it goes on")
            return told

        return call


class Servers:
    """What servers say of themselves, by server; those that are not named say nothing."""

    def __init__(self) -> None:
        """Start with none that answers."""
        self.say: dict[str, Seen | Exception | None] = {}
        self.asked: Counter[str] = Counter()
        self.at_once = 0
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:  # noqa: ARG002 - the protocol's
        """Answer for an endpoint."""
        self.asked[endpoint.server] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            said = self.say.get(endpoint.server)
        finally:
            self.at_once -= 1
        if isinstance(said, Exception):
            raise said
        return said
