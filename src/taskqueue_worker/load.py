"""From ``module:attr`` on the command line to a worker."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from taskqueue_core.errors import ConfigurationError
from taskqueue_worker.base import BaseWorker

__all__ = ["load_worker"]

_WORD = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


def load_worker(token: str) -> BaseWorker:
    """Import the worker that ``word`` names: ``package.module:attr``, or a module with exactly one worker.

    The current directory is searched as well, first. Raises `ConfigurationError` that says what is missing.
    """
    module_name, _, attribute = token.partition(":")
    if not _WORD.fullmatch(token):
        raise ConfigurationError(
            f"a worker is named like 'package.module:attr', not {token[:200]!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(module_name, error) from error
        raise ConfigurationError(
            f"there is no module {error.name!r} here or among the installed packages"
        ) from error
    except Exception as error:
        raise _broken(module_name, error) from error
    if not attribute:
        return _only_worker(module_name, vars(module))
    result: object = module
    for name in attribute.split("."):
        if not hasattr(result, name):
            raise ConfigurationError(
                f"module {module_name!r} has no {attribute!r}{_hint(vars(module))}"
            )
        result = getattr(result, name)
    if not isinstance(result, BaseWorker):
        raise ConfigurationError(
            f"{token!r} is a {type(result).__name__}, not a Worker{_hint(vars(module))}"
        )
    return result


def _only_worker(module_name: str, names: dict[str, object]) -> BaseWorker:
    matches = {id(value): value for value in names.values() if isinstance(value, BaseWorker)}
    if len(matches) != 1:
        count = "no worker" if not matches else f"{len(matches)} workers"
        raise ConfigurationError(
            f"module {module_name!r} has {count}{_hint(names)}; name one as 'module:attr'"
        )
    return next(iter(matches.values()))


def _hint(names: dict[str, object]) -> str:
    matches = sorted(name for name, value in names.items() if isinstance(value, BaseWorker))
    return f" (it has: {', '.join(matches)})" if matches else ""


def _broken(module_name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"importing {module_name!r} failed: {type(error).__name__}: {error}")
