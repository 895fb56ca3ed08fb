"""Extensions: operations and pages that other packages add to the server.

A package offers an extension as an entry point of the group ``taskqueue.extensions``: a callable without arguments that
returns an `Extension`. The server loads only the extensions that the setting ``TASKQUEUE_EXTENSIONS`` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_server.context.server import ServerContext
from taskqueue_server.routing.operations import Operation

EXTENSIONS_GROUP = "taskqueue.extensions"


class NavLink(msgspec.Struct, frozen=True):
    """A link in the navigation of every dashboard page."""

    title: str
    path: str


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """The operations and pages that a package adds to the server."""

    name: str
    open: Callable[[ServerContext], AbstractAsyncContextManager[object]]
    """Function that the server calls when it creates the application. It must not do I/O, and raises
    `ConfigurationError` or `CapabilityMissing` if the extension cannot work. The server enters the returned context
    manager before the first request, and exits it after the last request, before it closes the backend. Handlers find
    the value of the context manager in ``context.extension_state[name]``."""
    operations: tuple[Operation, ...] = ()
    """operations of the HTTP API, which are routed, authorized, counted and documented like the server's own"""
    tags: Mapping[str, str] = {}
    """tags of the operations, with their descriptions in the OpenAPI document"""
    pages: tuple[Operation, ...] = ()
    """pages of the dashboard; their errors are shown as pages instead of JSON documents"""
    links: tuple[NavLink, ...] = ()
    """links in the navigation of every dashboard page"""
    templates: str | None = None
    """name of a package with a folder ``templates``, whose file names differ from those of the dashboard's templates"""


def load_extensions(names: Collection[str]) -> tuple[Extension, ...]:
    """Return the extensions with these names, sorted by name. Raises `ConfigurationError` if one cannot be loaded."""
    return tuple(map(_load, sorted(set(names))))


def _load(name: str) -> Extension:
    points = {point.name: point for point in entry_points(group=EXTENSIONS_GROUP)}
    if name not in points:
        installed = ", ".join(sorted(points)) or "none"
        raise ConfigurationError(
            f"TASKQUEUE_EXTENSIONS: extension {name!r} not found; installed: {installed}"
        )
    try:
        extension = points[name].load()()
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the extension {name!r} needs the module {error.name!r}, which is not installed; "
            f"try: pip install 'taskqueue-backends[{name}]'"
        ) from error
    if not isinstance(extension, Extension):
        raise ConfigurationError(
            f"the entry point of {name!r} must return an Extension, not {type(extension).__name__}"
        )
    return extension


def check_extensions(own: Sequence[Operation], extensions: Sequence[Extension]) -> None:
    """Raise `ConfigurationError` if extensions share a name, or a path with each other or with the server."""
    names = Counter(extension.name for extension in extensions)
    paths = Counter({operation.address: 1 for operation in own})
    for extension in extensions:
        paths.update({operation.address for operation in (*extension.operations, *extension.pages)})
    for kind, counted in (("name", names), ("path", paths)):
        if twice := [text for text, times in counted.items() if times > 1]:
            raise ConfigurationError(
                f"the server and its extensions use the {kind} {twice[0]} more than once; "
                "remove an extension that uses it"
            )
