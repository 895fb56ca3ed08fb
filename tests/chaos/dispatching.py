"""Chaos runs of dispatchers: GPU servers that misbehave, a poisonous tenant, and callback hosts that hang."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import trustme

from taskqueue_core.capabilities import Order, control_of, dead_letters_of
from taskqueue_core.tasks import State
from taskqueue_dispatch.callbacks.records import record_of
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.registry import ModelRegistry
from tests.chaos.cast import Actor
from tests.chaos.history import What, merge
from tests.chaos.limiting import limit
from tests.chaos.programs.client import BEGIN
from tests.chaos.world import Outcome, Shape, World
from tests.redis.reserved import PortHold, reserve

_GPUS, _SLOTS = 3, 2
_CAST = {"gpu": _GPUS, "callback_hosts": 1, "dispatcher": 2, "client": 2}
_PHASES = {"warm": 0.4, "calm": 1.2, "beside": 1.2, "pause": 0.3}
"""seconds of each phase before the first fault: without poisonous jobs, and from ``beside`` on with them"""
_CALM = _PHASES["warm"] + _PHASES["calm"]
_EVERY = 0.025
"""seconds between two jobs of healthy tenants; poisonous ones come a third as often"""
_SECONDS = 5.4
"""seconds during which jobs are submitted"""
_HOUSEKEEPING = 0.22
"""seconds between two runs of maintenance: outages of a third of a lease count as a freeze; see docs/reliability.md"""
_ASKED = ModelConfig(
    poll_interval=0.1,
    max_poll_time=0.6,
    max_retries=1,
    order=Order.FAIR,
    poll_endpoint_template="/asked/status/{id}",
    health_path="/asked/health",
)
MODELS = {
    "asked": _ASKED,
    "plain": _ASKED.model_copy(
        update={"poll_endpoint_template": None, "health_path": "/plain/health"}
    ),
    "polled": _ASKED.model_copy(
        update={
            "model_type": ModelType.ASYNC,
            "poll_endpoint_template": "/polled/status/{id}",
            "health_path": "/polled/health",
        }
    ),
}
"""the models: results come with the response, with and without a page for polls, or are polled"""
_SETTINGS = {
    "LEASE": "2",
    "SAFETY_PASS": "0.3",
    "HEALTH_INTERVAL": "0.3",
    "SETTLED": "0.4",
    "BREAKER_REST": "0.2",
    "BUSY_REST": "0.05",
    "PARTITION": "5",
    "DRAIN": "0.2",
    "CALLBACK_HTTP": "true",
    "CALLBACK_NETWORKS": "127.0.0.0/8",
    "CALLBACK_TIMEOUT": "1",
    "CALLBACK_ATTEMPTS": "5",
}


class Dispatching(World):
    """A run with two dispatchers, GPU servers, callback hosts, and clients that submit jobs."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        """Reserve the ports without starting anything."""
        keys = tuple(map(queue_of, MODELS))
        shape = msgspec.structs.replace(
            shape or Shape(), keys=keys, consumers=0, producers=0, housekeeping=_HOUSEKEEPING
        )
        super().__init__(folder, shape, **more)
        self._authority = folder / "authority.pem"
        self._ports: list[PortHold] = [reserve() for _ in range(_GPUS + 1)]

    async def close(self) -> None:
        """End everything and release the ports."""
        await super().close()
        for port in self._ports:
            port.release()

    def misbehave(self, number: int, mode: str) -> None:
        """Make a GPU server do something wrong, or with an empty ``mode`` everything right."""
        (self.folder / f"gpu-{number}.mode").write_text(mode)

    async def prepare(self) -> None:
        """Register the endpoints and configure the models."""
        await super().prepare()
        registry = ModelRegistry(self.backend, DispatchSettings(_env_file=None))
        for model, config in MODELS.items():
            await registry.configure(model, config)
            for number, port in enumerate(self._ports[:_GPUS]):
                name = f"{model}-gpu-{number}"
                url = f"http://127.0.0.1:{port.port}/{model}/generate"
                await registry.register(model, name, url, _SLOTS)
                self.log.note(What.SETTINGS, key=name, name="slots", value=_SLOTS)
            # Without such a limit, the jobs of one tenant that exceed their time would have every slot.
            await limit(self, queue_of(model), tenant_max_inflight=_SLOTS * _GPUS // 2)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Give dispatchers and clients the store's address and the settings of a dispatcher."""
        if role in {"gpu", "callback_hosts"}:
            return self.more
        values = _SETTINGS | {"CALLBACK_PORTS": str(self._ports[-1].port)}
        mine = {f"TASKQUEUE_DISPATCH_{name}": value for name, value in values.items()}
        if not self._authority.exists():
            trustme.CA().cert_pem.write_to_path(str(self._authority))
        # Loading all the authorities of the system takes long.
        mine["SSL_CERT_FILE"] = str(self._authority)
        return mine | await super().environment(role, number)

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Return the settings of a process."""
        port = self._ports[number if role == "gpu" else -1].port
        told = {"seed": self.seed, "keys": self.shape.keys, "port": port}
        told["housekeeping"] = self.shape.housekeeping
        if role == "client":
            pace = _EVERY * 3 if number else _EVERY
            seconds = _SECONDS - _CALM if number else _SECONDS
            told |= {"tasks": round(seconds / pace), "pace": pace}
            told |= {"after": _CALM if number else 0.0, "poisonous": number > 0}
        return told

    def active(self, actor: Actor) -> bool:
        """Return whether a process serves, or a client is ready to submit jobs."""
        return actor.noted('"serving"') > 0

    async def begin(self) -> None:
        """Start all processes; submit jobs of healthy tenants, then those of the poisonous one too."""
        for role, count in _CAST.items():
            for number in range(count):
                await self.start(role, number)
        for actor in self.cast.all:
            await self.present(actor)
        signal = self.folder / BEGIN
        signal.write_text(str(time.monotonic()))
        for phase, seconds in _PHASES.items():
            self.phase(phase)
            await asyncio.sleep(seconds)

    async def quiesce(self) -> None:
        """Wait until everything is submitted and has ended, and all callbacks to the healthy host have come."""
        end = asyncio.get_running_loop().time() + self.terms.liveness
        self.phase("quiesce")
        for actor in self.cast.of("client"):
            await self.cast.ended(actor, seconds=self.terms.liveness)
        await self._drained(end)
        self.phase("done")
        expected = self._expected()
        (hosts,) = self.cast.of("callback_hosts")
        with contextlib.suppress(TimeoutError):  # the checker names the callbacks that are missing
            await self.until(lambda: expected <= _called(hosts.log), "all callbacks have come")

    def _expected(self) -> set[str]:
        events = merge(actor.log for actor in self.cast.of("client"))
        return {event.task for event in events if event.target == "callback"}

    async def judge(self) -> Outcome:
        """Record how each job and each callback has ended, then run the checker."""
        expected = self._expected()
        submitted = {
            (event.key, event.task)
            for event in merge(actor.log for actor in self.cast.of("client"))
            if event.what is What.PUBLISH
        }
        for key, task in sorted(submitted):
            await self._note_end(key, task)
            if task in expected and (record := await record_of(self.backend, task)):
                self.log.note(What.CALLBACK_ENDED, key=key, task=task, outcome=record.state)
        return await super().judge()

    async def _note_end(self, key: str, task: str) -> None:
        control = control_of(self.backend)
        (status,) = await control.statuses(key, task)
        state, note = "" if status is None else status.state.value, ""
        if state == State.DONE:
            (result,) = await control.results(key, task)
            note = "" if result is None else msgspec.json.decode(result)["job"]
        elif state == State.DEAD and (letter := await dead_letters_of(self.backend).get(key, task)):
            note = letter.reason
        self.log.note(What.ENDING, key=key, task=task, outcome=state, note=note)


def _called(log: Path) -> set[str]:
    return {event.task for event in merge([log]) if event.what is What.CALLBACK}
