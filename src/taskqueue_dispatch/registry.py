"""The models and their endpoints: changed at run time, kept in the slot pool, known here as of the last look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec
from pydantic import ValidationError

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Endpoint,
    EndpointInfo,
    PoolView,
    QueueSettings,
    control_of,
    slots_of,
)
from taskqueue_core.errors import (
    BackendUnavailable,
    InvalidInput,
    SettingsConflict,
    TaskQueueError,
)
from taskqueue_core.limits import check_label, check_name
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_policy import Allowed, Resolve, resolve
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of

_TRIES = 20
_PAUSE = RetryPolicy(base=0.01, cap=0.1, jitter=1)
_log = logging.getLogger("taskqueue.dispatch")


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model at a glance."""

    model: str
    key: str
    """its queue"""
    config: ModelConfig
    endpoints: tuple[EndpointInfo, ...] = ()
    """by order of registration"""

    @property
    def slots(self) -> int:
        """How many jobs its endpoints run at once, without those that get no more."""
        return sum(
            info.endpoint.slots for info in self.endpoints if not (info.draining or info.removed)
        )

    @property
    def usable(self) -> bool:
        """Whether an endpoint may get jobs."""
        return any(info.usable for info in self.endpoints)


class ModelRegistry:
    """What there is to dispatch to. Safe for concurrent use, and for any number of replicas.

    Methods that change something raise `InvalidInput` for what can't be, and `BackendUnavailable`; what they began
    another replica may end, or the same call again.
    """

    def __init__(
        self, backend: Backend, settings: DispatchSettings, *, resolve: Resolve = resolve
    ) -> None:
        """Do no input or output. Raises `CapabilityMissing`."""
        self.backend = backend
        self._pool = slots_of(backend)
        self._control = control_of(backend)
        self._allowed = Allowed(settings.endpoints_allowed, resolve)
        self._looking = asyncio.Lock()
        self._epoch: str | None = None
        self._views: dict[str, ModelView] = {}
        self._documents: dict[str, bytes] = {}
        self._configs: dict[str, tuple[bytes, ModelConfig]] = {}
        self._followed: dict[str, tuple[int, ModelConfig]] = {}
        """what a queue's settings were made from last"""
        self._listeners: list[Callable[[], None]] = []

    # Without input or output.

    @property
    def epoch(self) -> str | None:
        """The pool's epoch at the last look: see `PoolView.epoch`."""
        return self._epoch

    def view(self, model: str) -> ModelView | None:
        """Return a model as it was at the last look; ``None`` for one without endpoints and configuration."""
        return self._views.get(model)

    def known(self) -> tuple[ModelView, ...]:
        """Return all models as they were at the last look."""
        return tuple(self._views.values())

    def listen(self, result: Callable[[], None]) -> None:
        """Call ``told`` after each change of what is known, but for who holds and rests."""
        self._listeners.append(result)

    # Endpoints.

    async def register(
        self,
        model: str,
        server: str,
        endpoint: str,
        slots: int,
        *,
        priority: int = 5,
        reports: bool = True,
        together: int | None = None,
    ) -> EndpointInfo:
        """Add an endpoint, at the URL ``endpoint``, or change one; the capacity of the model's queue follows."""
        await self._allowed.check(endpoint)
        result = Endpoint(
            model=model,
            server=server,
            url=endpoint,
            slots=slots,
            priority=priority,
            reports=reports,
            together=together,
        )
        info = await self._pool.register(result)
        await self._follow(model)
        return info

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        """Give an endpoint no more jobs, or some again. False if there is no such endpoint."""
        exists = await self._pool.drain(model, server, draining=draining)
        await self._follow(model)
        return exists

    async def remove(self, model: str, server: str) -> bool:
        """Take an endpoint away; what runs there goes on. False if there is no such endpoint.

        The model's queue and configuration stay, also without any endpoint.
        """
        exists = await self._pool.remove(model, server)
        await self._follow(model)
        return exists

    async def models(self) -> tuple[ModelView, ...]:
        """Look, and return all models."""
        await self.refresh()
        return self.known()

    # Configuration.

    async def config(self, model: str) -> ModelConfig:
        """Return the configuration in force, from the store."""
        check_label("model", model)
        documents = await self._pool.documents()
        return self._read(model, documents.get(model))

    async def configure(self, model: str, config: ModelConfig | None) -> ModelConfig:
        """Replace a model's configuration, or with ``None`` go back to the defaults; return what is in force.

        What the configuration does not set follows the code's own defaults, also when these change.
        """
        check_label("model", model)
        for tenant in () if config is None else config.weights:
            check_name("weights", tenant)
        wanted = config or ModelConfig()
        _applied(wanted, await self._control.settings(queue_of(model)), 0)
        document = None
        if config is not None:
            document = config.model_dump_json(exclude_unset=True).encode()
        await self._pool.configure(model, document)
        await self._follow(model)
        return wanted

    # The look.

    async def refresh(self) -> None:
        """Look at the pool, and let the settings of queues follow what others have changed.

        Where the pool was emptied, what was known comes back. Raises `BackendUnavailable`, and knows what it knew.
        """
        async with self._looking:
            view, documents = await self._pool.inspect(), await self._pool.documents()
            if (
                self._documents.keys() - documents.keys()
            ):  # removed, or the pool was emptied in between
                view = await self._pool.inspect()
            if self._was_emptied(view) and await self._restore(view, documents):
                view, documents = await self._pool.inspect(), await self._pool.documents()
            if view.epoch != self._epoch:
                self._followed.clear()
            self._epoch = view.epoch
            self._documents = documents
            self._know(view.endpoints, documents, {*self._views})
        await self._catch_up()

    def _was_emptied(self, view: PoolView) -> bool:
        return self._epoch not in {None, view.epoch}

    async def _restore(self, view: PoolView, documents: dict[str, bytes]) -> int:
        """Register again what was known, and return how much: a pool that was emptied lacks it."""
        there = {(info.endpoint.model, info.endpoint.server) for info in view.endpoints}
        lost = [
            info
            for known in self._views.values()
            for info in known.endpoints
            if (known.model, info.endpoint.server) not in there and not info.removed
        ]
        for info in lost:
            model, server = info.endpoint.model, info.endpoint.server
            await self._pool.register(info.endpoint)
            if info.draining:
                await self._pool.drain(model, server)
        forgotten = self._documents.keys() - documents.keys()
        for model in forgotten:
            await self._pool.configure(model, self._documents[model])
        if lost or forgotten:
            figures = {"endpoints": len(lost), "configurations": len(forgotten)}
            _log.warning("the slot pool was emptied; endpoints registered again", extra=figures)
        return len(lost) + len(forgotten)

    def _know(
        self, infos: Iterable[EndpointInfo], documents: dict[str, bytes], models: set[str]
    ) -> None:
        """Replace what is known of ``models``, and learn what is told of others."""
        endpoints: dict[str, list[EndpointInfo]] = {}
        for info in infos:
            endpoints.setdefault(info.endpoint.model, []).append(info)
        before = self._views
        views = {name: view for name, view in before.items() if name not in models}
        for model in [*endpoints, *(documents.keys() - endpoints.keys())]:
            views[model] = ModelView(
                model=model,
                key=queue_of(model),
                config=self._read(model, documents.get(model)),
                endpoints=tuple(endpoints.get(model, ())),
            )
        self._views = views
        for config in (self._configs, self._followed):
            for model in config.keys() - views.keys():
                del config[model]
        if _gist(views) != _gist(before):
            for listener in self._listeners:
                listener()

    def _read(self, model: str, document: bytes | None) -> ModelConfig:
        """Return what a document says. One that says nothing of use is passed over, with a word in the log."""
        if document is None:
            return ModelConfig()
        read = self._configs.get(model)
        if read is None or read[0] != document:
            try:
                config = ModelConfig.model_validate_json(document)
            except ValidationError as error:
                config = ModelConfig()
                _log.warning(
                    "invalid model configuration in the store; using the defaults",
                    extra={"faults": error.error_count()},
                )
            read = self._configs[model] = document, config
        return read[1]

    # The settings of queues.

    async def _follow(self, model: str) -> None:
        """Let the settings of a model's queue follow its slots and configuration.

        The pool is looked at after the settings were read: so of two that do this at once the one that writes last
        has seen what both have changed, or finds the settings changed, and does it again.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                await self._follow_once(model)
            except SettingsConflict:
                if attempt == _TRIES:
                    raise
                await asyncio.sleep(_PAUSE.delay(attempt))
            else:
                return

    async def _follow_once(self, model: str) -> None:
        key = queue_of(model)
        settings = await self._control.settings(key)
        async with self._looking:
            view, documents = await self._pool.inspect(model), await self._pool.documents()
            own = {model: documents[model]} if model in documents else {}
            if model in self._documents and not own:  # removed, or the pool was emptied in between
                view = await self._pool.inspect(model)
            if not self._was_emptied(
                view
            ):  # else `refresh` restores what is known: it must not be forgotten here
                self._documents = {**self._documents, **own}
                if not own:
                    self._documents.pop(model, None)
                self._know(view.endpoints, own, {model})
        observed = self._views.get(model)
        if observed is None:  # its last endpoint is gone: its queue stays as it is
            return
        self._followed.pop(model, None)
        wanted = _applied(observed.config, settings, observed.slots)
        if wanted != settings:
            await self._control.configure(key, wanted)
        self._followed[model] = observed.slots, observed.config

    async def _catch_up(self) -> None:
        """Let follow what others have changed: they may not have come to it."""
        for view in self.known():
            state = view.slots, view.config
            if self._followed.get(view.model) == state:
                continue
            try:
                await self._follow(view.model)
            except BackendUnavailable:
                raise
            except TaskQueueError as error:
                self._followed[view.model] = state  # said once
                _log.warning(
                    "could not update the settings of a model's queue",
                    extra={"queue": view.key, "code": error.code},
                )


def _gist(views: dict[str, ModelView]) -> dict[str, object]:
    """Return what does not change with each job."""
    return {
        view.model: (
            view.config,
            [(info.endpoint, info.healthy, info.draining, info.removed) for info in view.endpoints],
        )
        for view in views.values()
    }


def _applied(config: ModelConfig, settings: QueueSettings, slots: int) -> QueueSettings:
    try:
        return config.applied_to(settings, slots)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]["msg"]
        text = fault.removeprefix("Value error, ")
        raise InvalidInput(
            "settings of the queue", text, "settings that go with a model's"
        ) from None
