"""Rules for the names of queues: a name consists of a prefix for the kind of task, and an id.

>>> routes = Routes(Route(kind="training", prefix="input:training:vt-"))
>>> routes.key("training", UUID(int=7))
'input:training:vt-00000000000000000000000000000007'
"""

from __future__ import annotations

import re
from uuid import UUID

from pydantic import BaseModel, ConfigDict, field_validator

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_name, kind_of

_DIGITS = 32
_ID = re.compile(r"[0-9a-f]{32}")


class Route(BaseModel):
    """The rule for the queue names of one kind of task: the prefix, followed by an id of 32 hexadecimal digits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    prefix: str
    shared: UUID | None = None
    """id that is used for all tasks of this kind, so that they share one queue; ``None``: each id has its own queue"""

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, prefix: str) -> str:
        try:
            check_name("prefix", prefix)
        except InvalidInput as error:
            raise ValueError(str(error)) from error
        if len(prefix) > LIMITS.name - _DIGITS:
            raise ValueError(
                f"at most {LIMITS.name - _DIGITS} characters, because an id is appended"
            )
        return prefix


class Routes:
    """The routes of an application, one per kind of task. Raises `ConfigurationError` if a kind has two routes."""

    def __init__(self, *routes: Route) -> None:
        self._routes = {route.kind: route for route in routes}
        if len(self._routes) < len(routes):
            raise ConfigurationError("two routes have the same kind; use each kind only once")

    def key(self, kind: str, of: UUID) -> str:
        """Return the queue name for tasks of this kind whose owner has the id ``of``; shared routes ignore it."""
        route = self._routes.get(kind)
        if route is None:
            raise InvalidInput("kind", kind_of(kind), f"one of {', '.join(sorted(self._routes))}")
        return route.prefix + (of if route.shared is None else route.shared).hex

    def kinds(self, key: str) -> tuple[str, ...]:
        """Return the kinds of tasks that may be in a queue, sorted; empty if no route matches the name."""
        digits = key[-_DIGITS:]
        if not _ID.fullmatch(digits):
            return ()
        return tuple(kind for kind in sorted(self._routes) if self.key(kind, UUID(digits)) == key)
