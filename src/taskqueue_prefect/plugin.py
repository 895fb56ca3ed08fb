"""The plugin's entry point. Every process that imports Prefect imports this module, so it must be small.

Without a configured backend it does nothing. Otherwise it installs an import hook, which applies
`taskqueue_prefect.patches` to four modules of Prefect's server as they are imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pluggy

PREFECT_PLUGIN_API_REQUIRES = ">=0.1,<1"

# the project name of Prefect's plugin hooks, which is the same in all releases with plugins
hookimpl = pluggy.HookimplMarker("prefect-experimental")


@hookimpl
def setup_environment(ctx: Any = None) -> None:  # noqa: ARG001 - Prefect passes this argument
    """Make Prefect's server use the configured queue. Idempotent, because Prefect calls this hook more than once."""
    install()


def install() -> bool:
    """Install the plugin; return whether a backend is configured."""
    from taskqueue_prefect.settings import BACKEND, environment

    os.environ.update(environment())
    if not os.environ.get(BACKEND):
        return False
    after_import(dict.fromkeys(_MODULES, _replace))
    return True


_MODULES = (
    "prefect.server.task_queue",
    "prefect.server.models.task_workers",
    "prefect.server.utilities.subscriptions",
    "prefect.server.api.server",
)


def _replace(module: ModuleType) -> None:
    from taskqueue_prefect import patches

    patches.replace(module)


Action = Callable[[ModuleType], None]


def after_import(actions: Mapping[str, Action]) -> None:
    """Call each action once its module is imported, or now if it already is.

    Only the first call of this function has an effect.
    """
    for finder in sys.meta_path:
        if isinstance(finder, ImportHookFinder):
            return
    sys.meta_path.insert(0, ImportHookFinder(actions))
    for name, action in actions.items():
        if (module := sys.modules.get(name)) is not None:
            action(module)


class ImportHookFinder(MetaPathFinder):
    """A finder that delegates to the other finders, and calls an action after the module's code has run."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has an action; ``None`` for every other module."""
        if fullname not in self._actions:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                if spec.loader is not None:
                    _call_after(spec.loader, self._actions[fullname])
                return spec
        return None


def _call_after(loader: Loader, action: Action) -> None:
    """Make a loader call an action after it has executed a module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        action(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
