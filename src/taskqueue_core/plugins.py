"""Find the installed hook plugins and register those that may be used."""

from __future__ import annotations

import logging
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from taskqueue_core.hooks import HOOK_API, Hooks

__all__ = ["PLUGIN_GROUP", "load_plugins"]

PLUGIN_GROUP = "taskqueue.plugins"
_plugins_log = logging.getLogger("taskqueue.plugins")


def load_plugins(
    hooks: Hooks,
    *,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    found: Collection[EntryPoint] | None = None,
) -> tuple[str, ...]:
    """Register the installed plugins; return the names of those that were.

    ``allow`` (``None``: all) and ``deny`` hold entry-point names; ``deny`` wins, and what is not
    allowed is not even imported. A plugin that fails to import, does not declare
    ``TASKQUEUE_HOOK_API``, or declares another than `HOOK_API` is logged and passed over.
    """
    loaded = []
    for point in sorted(found if found is not None else entry_points(group=PLUGIN_GROUP)):
        if point.name in deny or (allow is not None and point.name not in allow):
            continue
        try:
            plugin = point.load()
            plugin = plugin() if isinstance(plugin, type) else plugin
            written_for = getattr(plugin, "TASKQUEUE_HOOK_API", None)
            if written_for != HOOK_API:
                _plugins_log.error(
                    "plugin %s is for hook API %s, this is %s: not loaded",
                    point.name,
                    written_for,
                    HOOK_API,
                )
                continue
            hooks.register(plugin, name=point.name)
        except Exception:  # noqa: BLE001 - a plugin may raise anything; it is logged with its trace
            _plugins_log.exception("plugin %s could not be loaded", point.name)
        else:
            loaded.append(point.name)
    return tuple(loaded)
