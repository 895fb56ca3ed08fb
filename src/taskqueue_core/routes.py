"""Names of queues by a rule: a kind of work and an id give the key of exactly one queue.

Publishers, workers and operators get the names from here and do not put them together by hand:

>>> routes = Routes(Route(kind="training", prefix="input:training:vt-"))
>>> routes.key("training", UUID(int=7))
'input:training:vt-00000000000000000000000000000007'
"""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel, ConfigDict, field_validator

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_name, kind_of

_DIGITS = 32


class Route(BaseModel):
    """The rule for the queues of one kind of task: a queue's name is the prefix and an id of 32 hexadecimal digits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    prefix: str
    shared: UUID | None = None
    """one id for all: every task of this kind goes into one queue, which other kinds may share"""

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
    """The rule: one route per kind."""

    def __init__(self, *routes: Route) -> None:
        """Check the routes. Raises `ConfigurationError` for a kind that has two."""
        self._routes = {route.kind: route for route in routes}
        if len(self._routes) < len(routes):
            raise ConfigurationError("two routes have the same kind of work; use each kind once")

    def key(self, kind: str, of: UUID) -> str:
        """Return the name of the queue. Raises `InvalidInput` for a kind without a route."""
        route = self._routes.get(kind)
        if route is None:
            raise InvalidInput("kind", kind_of(kind), f"one of {', '.join(sorted(self._routes))}")
        return route.prefix + (of if route.shared is None else route.shared).hex

    def kinds(self, key: str) -> tuple[str, ...]:
        """Return the kinds of work that may be in a queue, sorted; none for a name of another rule."""
        prefix, digits = key[:-_DIGITS], key[-_DIGITS:]
        matches = (
            route.kind
            for route in self._routes.values()
            if route.prefix == prefix and _is_id(digits) and route.shared in (None, UUID(digits))
        )
        return tuple(sorted(matches))


def _is_id(digits: str) -> bool:
    try:
        return UUID(digits).hex == digits
    except ValueError:
        return False
