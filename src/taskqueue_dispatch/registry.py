"""The models and their endpoints: stored in the slot pool, changed at run time, and cached by `ModelRegistry`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from pydantic import ValidationError

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Endpoint,
    EndpointInfo,
    PoolView,
    QueueSettings,
    SlotLease,
    control_of,
    slots_of,
)
from taskqueue_core.errors import (
    BackendUnavailable,
    InvalidInput,
    SettingsConflict,
    TaskQueueError,
)
from taskqueue_core.hooks import SESSION_DOCUMENTS
from taskqueue_core.limits import check_label, check_name
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_policy import EndpointPolicy, Resolve, resolve
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of

_MAX_TRIES = 20
_BACKOFF = RetryPolicy(base=0.01, cap=0.1, jitter=1)
_log = logging.getLogger("taskqueue.dispatch")


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its configuration and its endpoints."""

    model: str
    key: str
    """name of the model's queue"""
    config: ModelConfig
    endpoints: tuple[EndpointInfo, ...] = ()
    """endpoints in the order in which they were registered"""

    @property
    def slots(self) -> int:
        """Return the number of slots of the model's endpoints, except draining and removed endpoints."""
        return sum(
            info.endpoint.slots for info in self.endpoints if not (info.draining or info.removed)
        )

    @property
    def usable(self) -> bool:
        """Return whether any endpoint of the model can receive jobs."""
        return any(info.usable for info in self.endpoints)


class ModelRegistry:
    """The registered models. Safe for concurrent use, in any number of replicas.

    Methods that change something raise `InvalidInput`, `BackendUnavailable`, and `SettingsConflict` if other clients
    keep changing the queue's settings. If such a call fails halfway, the change is completed by the next refresh of any
    replica, or by repeating the call.
    """

    def __init__(
        self, backend: Backend, settings: DispatchSettings, *, resolve: Resolve = resolve
    ) -> None:
        """Create a registry without I/O. Raises `CapabilityMissing` if the backend lacks ``slots`` or ``control``."""
        self.backend = backend
        self._pool = slots_of(backend)
        self._control = control_of(backend)
        self._allowed = EndpointPolicy(settings.endpoints_allowed, resolve)
        self._refreshing = asyncio.Lock()
        self.epoch: str | None = None
        """the epoch of the slot pool at the last refresh: see `PoolView.epoch`"""
        self.secrets: tuple[str, ...] = ()
        """the secret of the slot pool, and the one before the pool was emptied: see `PoolView.secret`"""
        self.leases: tuple[SlotLease, ...] = ()
        """all leases at the last refresh"""
        self._views: dict[str, ModelView] = {}
        self._documents: dict[str, bytes] = {}
        self._configs: dict[str, tuple[bytes, ModelConfig]] = {}
        self._queue_inputs: dict[str, tuple[int, ModelConfig]] = {}
        """number of slots and configuration from which the settings of each queue were last computed"""
        self._listeners: list[Callable[[], None]] = []

    def view(self, model: str) -> ModelView | None:
        """Return a model from the cache, or ``None`` if it has neither endpoints nor a configuration."""
        return self._views.get(model)

    def known(self) -> tuple[ModelView, ...]:
        """Return all models from the cache."""
        return tuple(self._views.values())

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each change of the models, but not after changes to leases and pauses."""
        self._listeners.append(callback)

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
        """Add or change an endpoint with the URL ``endpoint``, and update the capacity of the model's queue."""
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
        await self._update_queue(model)
        return info

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        """Stop sending jobs to an endpoint, or resume sending them. Return False if there is no such endpoint."""
        exists = await self._pool.drain(model, server, draining=draining)
        await self._update_queue(model)
        return exists

    async def remove(self, model: str, server: str) -> bool:
        """Remove an endpoint; its running jobs continue. Return False if there is no such endpoint.

        The model's queue and configuration are kept, even without any endpoint.
        """
        exists = await self._pool.remove(model, server)
        await self._update_queue(model)
        return exists

    async def models(self) -> tuple[ModelView, ...]:
        """Read the models from the store and return them."""
        await self.refresh()
        return self.known()

    async def config(self, model: str) -> ModelConfig:
        """Return the current configuration of a model, read from the store."""
        check_label("model", model)
        documents = await self._read_documents()
        return self._read(model, documents.get(model))

    async def configure(self, model: str, config: ModelConfig | None) -> ModelConfig:
        """Replace a model's configuration, or reset it with ``None``. Return the configuration in force.

        Fields that the configuration does not set have the default values of the running version.
        """
        check_label("model", model)
        if model.startswith(SESSION_DOCUMENTS):
            raise InvalidInput(
                "model", "a reserved name", f"a name without the prefix {SESSION_DOCUMENTS!r}"
            )
        for tenant in () if config is None else config.weights:
            check_name("weights", tenant)
        new = config or ModelConfig()
        _applied(new, await self._control.settings(queue_of(model)), 0)
        document = None
        if config is not None:
            document = config.model_dump_json(exclude_unset=True).encode()
        await self._pool.configure(model, document)
        await self._update_queue(model)
        return new

    async def refresh(self) -> None:
        """Read the slot pool, and update the queues of models that other replicas have changed.

        If the pool was emptied, restore the cached endpoints and configurations. Raises `BackendUnavailable`; if the
        pool could not be read, the cache is unchanged.
        """
        async with self._refreshing:
            view, documents = await self._pool.inspect(), await self._read_documents()
            # If a cached configuration is missing, it was removed, or the pool was emptied between the two calls.
            # Inspect the pool again to find out which.
            if self._documents.keys() - documents.keys():
                view = await self._pool.inspect()
            if self._was_emptied(view) and await self._restore(view, documents):
                view, documents = await self._pool.inspect(), await self._read_documents()
            if view.epoch != self.epoch:
                self._queue_inputs.clear()
            self.epoch, self.leases = view.epoch, view.leases
            if self.secrets[:1] != (view.secret,):
                self.secrets = (view.secret, *self.secrets[:1])
            self._documents = documents
            self._cache(view.endpoints, documents, {*self._views})
        await self._update_queues()

    async def _read_documents(self) -> dict[str, bytes]:
        documents = await self._pool.documents()
        return {
            model: text
            for model, text in documents.items()
            if not model.startswith(SESSION_DOCUMENTS)
        }

    def _was_emptied(self, view: PoolView) -> bool:
        return self.epoch not in {None, view.epoch}

    async def _restore(self, view: PoolView, documents: dict[str, bytes]) -> int:
        """Register the cached endpoints and configurations that an emptied pool lacks. Return their number."""
        present = {(info.endpoint.model, info.endpoint.server) for info in view.endpoints}
        lost = [
            info
            for known in self._views.values()
            for info in known.endpoints
            if (known.model, info.endpoint.server) not in present and not info.removed
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
            _log.warning("the slot pool was emptied, and has been restored", extra=figures)
        return len(lost) + len(forgotten)

    def _cache(
        self, infos: Iterable[EndpointInfo], documents: dict[str, bytes], models: set[str]
    ) -> None:
        """Replace the cached views of ``models``, and of other models that occur in ``infos`` or ``documents``."""
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
        for config in (self._configs, self._queue_inputs):
            for model in config.keys() - views.keys():
                del config[model]
        if _stable(views) != _stable(before):
            for listener in self._listeners:
                listener()

    def _read(self, model: str, document: bytes | None) -> ModelConfig:
        """Parse a configuration. If it is invalid, log this and return the defaults."""
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

    async def _update_queue(self, model: str) -> None:
        """Update the settings of a model's queue from its slots and configuration.

        The pool is read after the settings. If two replicas do this at the same time, the later writer has therefore
        seen both changes, or its write conflicts and it starts again.
        """
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                await self._update_queue_once(model)
            except SettingsConflict:
                if attempt == _MAX_TRIES:
                    raise
                await asyncio.sleep(_BACKOFF.delay(attempt))
            else:
                return

    async def _update_queue_once(self, model: str) -> None:
        key = queue_of(model)
        settings = await self._control.settings(key)
        async with self._refreshing:
            view, documents = await self._pool.inspect(model), await self._read_documents()
            own = {model: documents[model]} if model in documents else {}
            # If a cached configuration is missing, it was removed, or the pool was emptied between the two calls.
            # Inspect the pool again to find out which.
            if model in self._documents and not own:
                view = await self._pool.inspect(model)
            # Do not replace the cache if the pool was emptied, because `refresh` restores the pool from the cache.
            if not self._was_emptied(view):
                self._documents = {**self._documents, **own}
                if not own:
                    self._documents.pop(model, None)
                self._cache(view.endpoints, own, {model})
        observed = self._views.get(model)
        # If the model has neither endpoints nor a configuration any more, its queue keeps its settings.
        if observed is None:
            return
        self._queue_inputs.pop(model, None)
        new = _applied(observed.config, settings, observed.slots)
        if new != settings:
            await self._control.configure(key, new)
        self._queue_inputs[model] = observed.slots, observed.config

    async def _update_queues(self) -> None:
        """Update queues after changes by other replicas, which may have failed before they updated the queues."""
        for view in self.known():
            state = view.slots, view.config
            if self._queue_inputs.get(view.model) == state:
                continue
            try:
                await self._update_queue(view.model)
            except BackendUnavailable:
                raise
            except TaskQueueError as error:
                # Keep the state despite the error, so that the same error is not logged at every refresh.
                self._queue_inputs[view.model] = state
                _log.warning(
                    "could not update the settings of a model's queue",
                    extra={"queue": view.key, "code": error.code},
                )


def endpoint_state(info: Any, now: float) -> tuple[str, str]:
    """Return an endpoint's state as text, and its display style: ``ok``, ``warn``, ``paused`` or ``bad``.

    ``info`` is an `EndpointInfo`, or a response of the HTTP API with the same fields.
    """
    if info.removed:
        return "removed", "warn"
    if info.draining:
        return "draining", "paused"
    if not info.healthy:
        return "not healthy", "bad"
    if info.resting_until is not None and info.resting_until > now:
        return "resting", "warn"
    return "ready", "ok"


def _stable(views: dict[str, ModelView]) -> dict[str, object]:
    """Return the parts of the views that do not change with each job."""
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
            "settings of the queue",
            f"a conflict with the model's configuration ({text})",
            "settings that can be combined with the configuration",
        ) from None
