"""Parts: what other packages bring into the server, on its port, behind its door and in its tables.

A package offers one as an entry point of the group ``taskqueue.extensions``: a callable without arguments that gives a
`Extension`. Whoever starts the server names those that it has, in ``TASKQUEUE_EXTENSIONS``; nothing else brings one in.
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

__all__ = ["EXTENSIONS_GROUP", "Extension", "NavLink", "check_extensions", "load_extensions"]

EXTENSIONS_GROUP = "taskqueue.extensions"


class NavLink(msgspec.Struct, frozen=True):
    """Leads to a page, from all of them."""

    title: str
    path: str


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """What a package brings."""

    name: str
    open: Callable[[ServerContext], AbstractAsyncContextManager[object]]
    """Called as the application is made, without input or output: raises `ConfigurationError` or `CapabilityMissing`
    for what cannot work. What it returns is entered before the first request, and left after the last one and before
    the backend is closed; handlers find what entering it gave in ``context.brought[name]``."""
    operations: tuple[Operation, ...] = ()
    """routed, authorised, counted and described as those of the server"""
    tags: Mapping[str, str] = {}
    """what the headings of the operations mean"""
    pages: tuple[Operation, ...] = ()
    """of the dashboard: their problems are pages, too"""
    links: tuple[NavLink, ...] = ()
    """to these pages"""
    templates: str | None = None
    """a package whose folder ``templates`` has those of the pages, under names that the dashboard's have not"""


def load_extensions(names: Collection[str]) -> tuple[Extension, ...]:
    """Return the installed parts of these names, in the order of the names. Raises `ConfigurationError`."""
    return tuple(map(_load, sorted(set(names))))


def _load(name: str) -> Extension:
    matches = {point.name: point for point in entry_points(group=EXTENSIONS_GROUP)}
    if name not in matches:
        installed = ", ".join(sorted(matches)) or "none"
        raise ConfigurationError(
            f"TASKQUEUE_EXTENSIONS: no extension {name!r}; installed: {installed}"
        )
    try:
        part = matches[name].load()()
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the extension {name!r} needs the module {error.name!r}, which is not installed; "
            f"try: pip install 'taskqueue-backends[{name}]'"
        ) from error
    if not isinstance(part, Extension):
        raise ConfigurationError(
            f"the extension {name!r}: got {type(part).__name__}; allowed: an Extension"
        )
    return part


def check_extensions(own: Sequence[Operation], extensions: Sequence[Extension]) -> None:
    """Raise `ConfigurationError` where two have one name, or one path: neither may take the other's requests."""
    names = Counter(part.name for part in extensions)
    paths = Counter({operation.address: 1 for operation in own})
    for part in extensions:
        paths.update({operation.address for operation in (*part.operations, *part.pages)})
    for kind, counted in (("name", names), ("path", paths)):
        if twice := [text for text, times in counted.items() if times > 1]:
            raise ConfigurationError(
                f"two extensions of the server have the same {kind}: {twice[0]}"
            )
