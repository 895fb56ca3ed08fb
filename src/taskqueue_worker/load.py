"""Import of a worker, or of the tasks for one, whose name is given on the command line."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from taskqueue_core.application.registry import Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_worker.base import BaseWorker
from taskqueue_worker.server_worker import Worker

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


def load_worker(target: str) -> BaseWorker:
    """Import and return the worker ``package.module:attr``, or the only worker of ``package.module``.

    If it is a registry of tasks, return a worker for it.

    Adds the current directory to the front of `sys.path`, unless `sys.path` contains it. Raises `ConfigurationError` if
    the name is invalid, the import fails, there is no such worker, or there are several and ``attr`` is not given.

    >>> load_worker("shop.tasks:tasks").keys
    ('shop.resize', 'shop.charge', 'shop.remind', 'shop.refund', 'shop.measure', 'shop.describe')
    """
    module_name, _, attribute = target.partition(":")
    if not _TARGET.fullmatch(target):
        raise ConfigurationError(
            f"{target[:200]!r} names no registry of tasks or worker: use 'package.module:attr'"
        )
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_failed(module_name, error) from error
        raise ConfigurationError(
            f"module {error.name!r} not found in the current folder or the installed packages"
        ) from error
    except Exception as error:
        raise _import_failed(module_name, error) from error
    if not attribute:
        return _only_worker(module_name, vars(module))
    resolved: object = module
    for name in attribute.split("."):
        if not hasattr(resolved, name):
            raise ConfigurationError(
                f"module {module_name!r} has no {attribute!r}{_hint(vars(module))}"
            )
        resolved = getattr(resolved, name)
    return _worker_of(resolved, target, vars(module))


def _worker_of(value: object, target: str, names: dict[str, object]) -> BaseWorker:
    worker = Worker(value) if isinstance(value, Tasks) else value
    if not isinstance(worker, BaseWorker):
        raise ConfigurationError(
            f"{target!r} is a {type(value).__name__}, not a registry of tasks or a worker{_hint(names)}"
        )
    worker.target = target
    return worker


def _only_worker(module_name: str, names: dict[str, object]) -> BaseWorker:
    for kind, many in ((BaseWorker, "workers"), (Tasks, "registries of tasks")):
        found = {id(value): value for value in names.values() if isinstance(value, kind)}
        if len(found) == 1:
            return _worker_of(next(iter(found.values())), module_name, names)
        if found:
            raise ConfigurationError(
                f"module {module_name!r} has {len(found)} {many}{_hint(names)}; name one as 'module:attr'"
            )
    raise ConfigurationError(
        f"module {module_name!r} has no worker and no registry of tasks; name one as 'module:attr'"
    )


def _hint(names: dict[str, object]) -> str:
    found = sorted(name for name, value in names.items() if isinstance(value, BaseWorker | Tasks))
    return f" (in this module: {', '.join(found)})" if found else ""


def _import_failed(module_name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"importing {module_name!r} failed: {type(error).__name__}: {error}")
