"""Parts for tests that need no whole dispatcher: a model registry, slots, and wrappers that simulate failures."""

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
"""model names that are hard to quote or encode"""


def settings(**values: Any) -> DispatchSettings:
    """Return dispatcher settings that ignore the environment."""
    return DispatchSettings(_env_file=None, **values)


async def registry_of(backend: Backend, **values: Any) -> ModelRegistry:
    """Return a model registry that has read the store once, as a separate process would have."""
    registry = ModelRegistry(backend, settings(**values))
    await registry.refresh()
    return registry


async def well(backend: Backend, model: str, server: str) -> None:
    """Mark an endpoint as healthy in the slot pool."""
    await slots_of(backend).reconcile(model, server, Seen(active=0), settled=0)


async def free(pool: SlotPool, model: str) -> int:
    """Return the number of free slots of a model."""
    return sum(info.free for info in (await pool.inspect(model)).endpoints)


class Failing:
    """Wraps a part of a backend.

    While ``down``, each call fails: before it takes effect, or with ``after`` once it has.
    """

    def __init__(self, part: object) -> None:
        """Wrap the part; calls succeed until ``down`` is set."""
        self._part = part
        self.down = False
        self.after = False
        self.calls: Counter[str] = Counter()
        self.held: set[str] = set()
        """names of methods whose calls return only after the name is removed from this set"""

    def put(self, name: str, call: Any) -> None:
        """Replace the method ``name`` of the wrapped part with ``call``."""
        setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped part's attribute; a coroutine method is replaced with one that may fail."""
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
            await until(lambda: name not in self.held, "the call may return")
            return told

        return call


class Servers:
    """Fake health reports of GPU servers, by server name; a server without an entry gives no report."""

    def __init__(self) -> None:
        """Start without any health report."""
        self.say: dict[str, Seen | Exception | None] = {}
        self.asked: Counter[str] = Counter()
        self.at_once = 0
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:  # noqa: ARG002 - the protocol requires the argument
        """Return, or raise, the health report set for the endpoint's server."""
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
