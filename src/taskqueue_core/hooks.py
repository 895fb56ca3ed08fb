"""Hooks, through which plugins observe tasks and workers, and authenticate clients.

A plugin is any object or module with functions marked by `hookimpl`. A function declares only the parameters that it
needs. Hooks are called in the event loop, and must return quickly. A hook is called once for a batch of tasks. Errors
that a hook raises are logged and ignored.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from math import inf
from typing import Any

import msgspec
import pluggy

from taskqueue_core.capabilities import Maintained
from taskqueue_core.retry import Bury
from taskqueue_core.tasks import Confirmation, Delivery, Expired, Settled, Task

HOOK_API = 1
"""version of the hooks, increased with each incompatible change; plugins declare it as ``TASKQUEUE_HOOK_API``"""

_PROJECT = "taskqueue"
hookspec = pluggy.HookspecMarker(_PROJECT)
hookimpl = pluggy.HookimplMarker(_PROJECT)
_log = logging.getLogger("taskqueue.hooks")


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's socket connection."""

    connection_id: str
    worker_id: str
    keys: tuple[str, ...]


INTERNAL_QUEUES = frozenset({"dispatch.callbacks", "prefect.reconcile"})
"""queues whose tasks the server itself writes and executes, so that a client must not add to them"""
_OWN = "_taskqueue."
"""prefix of the names of queues that only this project uses"""
_SEEING_ALL = ("observe", "admin")
"""verbs that patterns allow for internal queues, too"""
SESSION_DOCUMENTS = "dashboard session "
"""prefix of the names under which the slot pool stores sessions of the dashboard; no model's name may start with it"""


def is_internal(key: str) -> bool:
    """Return whether the tasks of a queue are written and executed by the server itself."""
    return key in INTERNAL_QUEUES or key.startswith(_OWN)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The client that a token belongs to, and its permissions: it may use ``verbs`` on queues that match ``keys``.

    An item of ``keys`` is a key, or a prefix followed by ``*``; ``*`` alone matches all keys. To publish to a queue in
    `INTERNAL_QUEUES`, or to consume from it, the key itself must be an item; no client may do so with a queue whose
    name begins with ``_taskqueue.``. Raises `TypeError` for invalid values, because a single string in place of a tuple
    of strings would grant more than intended.
    """

    name: str
    verbs: frozenset[str] = frozenset({"publish", "consume", "observe", "admin"})
    keys: tuple[str, ...] = ("*",)
    rate: float | None = None
    """maximum number of requests and published tasks per second, for all clients of this name at one server process"""
    burst: float | None = None
    """maximum number of requests and tasks in a burst after a pause; ``None``: as many as ``rate`` allows per second"""
    connections: int | None = None
    """maximum number of open sockets, for all clients of this name at one server process; ``None``: 2,500"""

    def __post_init__(self) -> None:
        """Validate all fields, because plugins create identities."""
        names: tuple[object, ...] = (self.name, *self.verbs, *self.keys)
        several: tuple[object, object] = self.verbs, self.keys
        if not all(isinstance(name, str) for name in names) or any(
            isinstance(item, str) for item in several
        ):
            raise TypeError("Identity needs a name, a set of verbs and a tuple of keys")
        # Plugins may pass lists, which cannot be hashed, and may change later.
        msgspec.structs.force_setattr(self, "verbs", frozenset(self.verbs))
        msgspec.structs.force_setattr(self, "keys", tuple(self.keys))
        limits: tuple[object, ...] = (self.rate, self.burst, self.connections)
        for limit in limits:
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit < inf):
                raise TypeError(
                    "Identity: rate, burst and connections must be finite numbers above 0"
                )

    def is_allowed(self, verb: str, key: str | None = None) -> bool:
        """Return whether ``verb`` is allowed for ``key`` or, without a key, for all keys."""
        if verb not in self.verbs:
            return False
        if key is None:
            return "*" in self.keys
        if key.startswith(_OWN) and verb not in _SEEING_ALL:
            return False
        if key in INTERNAL_QUEUES and verb not in _SEEING_ALL:
            return key in self.keys
        return "*" in self.keys or any(
            key.startswith(pattern[:-1]) if pattern.endswith("*") else key == pattern
            for pattern in self.keys
        )


class _Specs:
    """The signatures of all hooks, against which pluggy checks plugins."""

    @hookspec
    def published(self, tasks: Sequence[Task], confirmations: Sequence[Confirmation]) -> None:
        """Observe tasks that a caller published, and their confirmations, which may be refusals, in the same order."""

    @hookspec
    def delivered(self, deliveries: Sequence[Delivery], consumer: str) -> None:
        """Observe deliveries that a subscription of ``consumer`` received."""

    @hookspec
    def settled(
        self, deliveries: Sequence[Delivery], verb: str, outcomes: Sequence[Settled]
    ) -> None:
        """Observe settlements of deliveries and their outcomes; ``verb`` is ``ack``, ``redeliver`` or ``lost``."""

    @hookspec
    def retry_scheduled(
        self,
        task: Task,
        at: float,
        error: str | None,
        confirmation: Confirmation,
        settles: Delivery | None,
    ) -> None:
        """Observe a scheduled retry. ``settles`` is the delivery that it settles; ``None`` if it settles none."""

    @hookspec
    def dead_lettered(self, delivery: Delivery, verdict: Bury) -> None:
        """Observe a delivery that ended as a dead letter."""

    @hookspec
    def expired(self, tasks: Sequence[Expired]) -> None:
        """Observe tasks that ended because their deadline had passed."""

    @hookspec
    def schedule_skipped(self, key: str, name: str, reason: str, count: int) -> None:
        """Observe ``count`` instants of a schedule of the queue ``key`` for which this process published no task."""

    @hookspec
    def unclaimed(self, keys: Sequence[str]) -> None:
        """Observe queues that have waiting tasks but no subscription, after a maintenance pass that found them."""

    @hookspec
    def maintained(self, done: Maintained | None) -> None:
        """Observe the end of a maintenance pass; ``done`` is ``None`` if the pass failed."""

    @hookspec
    def worker_connected(self, connection: Connection) -> None:
        """Observe the start of a worker's socket connection, which the server has accepted."""

    @hookspec
    def worker_disconnected(self, connection: Connection, reason: str) -> None:
        """Observe the end of a worker's socket connection."""

    @hookspec
    def authenticate(self, token: str | None, peer: str) -> Identity | None:
        """Return the identity of a token, or ``None`` if it is unknown. The first plugin that knows it decides."""


class Hooks:
    """The plugins of one process. An error in a plugin affects neither the caller nor other plugins."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(_PROJECT)
        self._manager.add_hookspecs(_Specs)
        self.listening = False
        """whether any plugin is registered; if not, frequent callers skip `fire`"""

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin. Raises `ValueError`, and adds nothing, if the plugin's hooks do not match the specification."""
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            self._check_plain(plugin)
            self.listening = True
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise ValueError(str(error)) from error

    def unregister(self, plugin: object) -> None:
        """Remove a plugin."""
        self._manager.unregister(plugin)
        self.listening = bool(self._manager.get_plugins())

    @property
    def plugins(self) -> tuple[str, ...]:
        """The names of the registered plugins."""
        return tuple(name for name, plugin in self._manager.list_name_plugin() if plugin)

    def wants(self, hook: str) -> bool:
        """Return whether any plugin implements ``hook``. If not, frequent callers need not prepare a call."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def fire(self, hook: str, **arguments: Any) -> None:
        """Call every implementation of ``hook``; log errors that they raise."""
        for _ in self._results(hook, arguments):
            pass

    def first(self, hook: str, **arguments: Any) -> Any:
        """Return the first result of ``hook`` that is not ``None``. A plugin that raises an error is skipped."""
        return next((item for item in self._results(hook, arguments) if item is not None), None)

    def _check_plain(self, plugin: object) -> None:
        for hook in self._manager.get_hookcallers(plugin) or ():
            for implementation in hook.get_hookimpls():
                wraps = implementation.wrapper or implementation.hookwrapper
                if implementation.plugin is plugin and (
                    wraps or inspect.iscoroutinefunction(implementation.function)
                ):
                    raise pluggy.PluginValidationError(
                        plugin, f"{hook.name} must be a plain function, neither async nor a wrapper"
                    )

    def _results(self, hook: str, arguments: dict[str, Any]) -> Iterator[Any]:
        # pluggy's own call would stop at the first implementation that fails, so implementations are called one by one.
        for plugin in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                yield plugin.function(*(arguments[name] for name in plugin.argnames))
            except Exception:  # noqa: BLE001 - a plugin may raise any error, which is logged
                _log.exception("plugin %s failed in hook %s", plugin.plugin_name, hook)


PLUGIN_GROUP = "taskqueue.plugins"
_plugins_log = logging.getLogger("taskqueue.plugins")


def load_plugins(
    hooks: Hooks,
    *,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    matches: Collection[EntryPoint] | None = None,
) -> tuple[str, ...]:
    """Register the installed plugins, and return the names of the plugins that were registered.

    ``allow`` (``None``: all) and ``deny``, which takes precedence, contain names of entry points. ``matches`` replaces
    the installed entry points. Plugins that are not allowed are not imported. A plugin is logged and skipped if it
    cannot be imported, or if its ``TASKQUEUE_HOOK_API`` is missing or differs from `HOOK_API`.
    """
    loaded = []
    for point in sorted(matches if matches is not None else entry_points(group=PLUGIN_GROUP)):
        if point.name in deny or (allow is not None and point.name not in allow):
            continue
        try:
            plugin = point.load()
            plugin = plugin() if isinstance(plugin, type) else plugin
            written_for = getattr(plugin, "TASKQUEUE_HOOK_API", None)
            if written_for != HOOK_API:
                _plugins_log.error(
                    "plugin %s not loaded: its TASKQUEUE_HOOK_API is %s, but must be %s",
                    point.name,
                    written_for,
                    HOOK_API,
                )
                continue
            hooks.register(plugin, name=point.name)
        except Exception:  # noqa: BLE001 - a plugin may raise any error, which is logged
            _plugins_log.exception("plugin %s could not be loaded", point.name)
        else:
            loaded.append(point.name)
    return tuple(loaded)
