"""Loading the backend that the configuration names.

The configured value is the name of an entry point in the group ``taskqueue.backends``, a module path, or
``module:attr``. A module must have a function ``create_backend``. That function, or the named attribute, is called
without arguments, reads its own settings, and returns the backend without connecting to the store.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, entry_points, metadata
from inspect import getattr_static
from typing import Any, cast

from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.errors import BackendNotFound, ConfigurationError, InvalidBackend

BACKEND_GROUP = "taskqueue.backends"
FACTORY = "create_backend"
_DISTRIBUTION = "taskqueue-backends"

_MEMBERS = ("capabilities", "publisher", "subscribe", "now", "health", "aclose")
_PUBLISHER = ("publish", "schedule_retry")
_ATTRIBUTES = {Capability.DEAD_LETTERS: "dead_letters", Capability.CONTROL: "control"}


def installed_backends() -> tuple[str, ...]:
    """Return the names of the installed backends."""
    return tuple(sorted({point.name for point in entry_points(group=BACKEND_GROUP)}))


def load_backend(name: str, **options: Any) -> Backend:
    """Create the backend ``name``, which is an entry point, a module path or ``module:attr``.

    ``options`` are arguments of its factory, instead of its settings. Raises `BackendNotFound` or `InvalidBackend`; the
    message says which backends are installed, what the module lacks, or what to install. A `ConfigurationError` that
    the backend itself raises is passed on.
    """
    factory = _factory(name)
    try:
        backend = factory(**options)
    except ConfigurationError:
        raise
    except Exception as error:
        raise InvalidBackend(
            f"backend {name!r}: its factory raised an exception: {_describe(error)}"
        ) from error
    check_backend(backend, name)
    return cast("Backend", backend)


def check_backend(backend: object, token: str) -> None:
    """Raise `InvalidBackend` if ``backend`` lacks part of the contract or of a capability that it declares."""
    missing = [name for name in _MEMBERS if not _has(backend, name)]
    if not missing:
        declared: object = cast("Backend", backend).capabilities
        if not isinstance(declared, Capabilities):
            missing.append("capabilities (must be taskqueue_core.backend.Capabilities)")
        else:
            missing += [
                f"{attribute} (declared as a capability)"
                for name, attribute in _ATTRIBUTES.items()
                if name in declared.names and not _has(backend, attribute)
            ]
        publisher = cast("Backend", backend).publisher
        missing += [f"publisher.{name}" for name in _PUBLISHER if not _has(publisher, name)]
    if missing:
        raise InvalidBackend(
            f"backend {token!r}: {type(backend).__name__} is not a backend; it lacks: {', '.join(missing)}; "
            "see docs/writing-a-backend.md"
        )


def _factory(name: str) -> Callable[..., Any]:
    point = next(iter(entry_points(group=BACKEND_GROUP, name=name)), None)
    path, _, attribute = name.partition(":")
    parts = [*path.split("."), *filter(None, attribute.split("."))]
    if point is None and not all(part.isidentifier() for part in parts):
        raise BackendNotFound(_not_found(name, "it is neither installed nor a module path"))
    try:
        result: object = point.load() if point else _attribute(name, path, attribute or FACTORY)
    except ConfigurationError:
        raise
    except ModuleNotFoundError as error:
        raise InvalidBackend(
            f"backend {name!r}: importing it needs the module {error.name!r}, which is not installed; "
            f"{_how_to_install(name, error)}"
        ) from error
    except Exception as error:
        raise InvalidBackend(
            f"backend {name!r}: importing it failed: {_describe(error)}"
        ) from error
    if not callable(result):
        raise InvalidBackend(
            f"backend {name!r}: got {type(result).__name__}; "
            "allowed: a callable without arguments that returns a backend"
        )
    return result


def _attribute(token: str, path: str, attribute: str) -> object:
    try:
        module: object = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise BackendNotFound(
                _not_found(token, f"there is no module {error.name!r}")
            ) from error
        raise
    for name in attribute.split("."):
        if not hasattr(module, name):
            raise InvalidBackend(
                f"backend {token!r}: the module {path!r} lacks {attribute!r}, a callable without "
                f"arguments that returns a backend; name another one as '{path}:NAME'; see docs/writing-a-backend.md"
            )
        module = getattr(module, name)
    return module


class MissingExtra(ModuleNotFoundError):
    """A dependency of this distribution is not installed; ``extra`` is the name of the extra that installs it."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"the module {module!r} is not installed: pip install '{_DISTRIBUTION}[{extra}]'",
            name=module,
        )
        self.extra = extra


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise `MissingExtra` if a module that the block imports needs a dependency that is not installed."""
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("taskqueue_"):
            raise
        raise MissingExtra(error.name, extra) from error


def _how_to_install(name: str, error: ModuleNotFoundError) -> str:
    extra = name.removeprefix("taskqueue_").partition(".")[0].partition(":")[0]
    try:
        ours = metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        ours = []
    if isinstance(error, MissingExtra):
        extra = error.extra
    elif extra not in ours:
        return "install the dependencies of the backend's package"
    return f"try: pip install '{_DISTRIBUTION}[{extra}]'"


def _not_found(name: str, why: str) -> str:
    names = ", ".join(installed_backends()) or "none"
    return (
        f"no backend {name!r}: {why}. Installed backends: {names}. Set TASKQUEUE_BACKEND to one of "
        "them, to a module path or to 'module:attr'; install others with "
        "pip install 'taskqueue-backends[NAME]' or from their own packages"
    )


def _has(thing: object, name: str) -> bool:
    try:
        getattr_static(thing, name)
    except AttributeError:
        return hasattr(thing, name)
    return True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
