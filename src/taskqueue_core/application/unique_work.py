"""The unique keys of declared tasks: which arguments make two calls the same work."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.uniqueness import Unique, UniqueKey, sha256

_ANYTHING = TypeAdapter(Any)


class UniqueWork:
    """Makes the unique keys of one declared task."""

    def __init__(self, name: str, signature: inspect.Signature, *, batch: bool) -> None:
        """Inspect the arguments of a task. ``batch``: its payloads are items, whose members are not known."""
        self._name = name
        self._batch = batch
        self._parameters = signature.parameters
        self._defaults: dict[str, Any] = {}
        for parameter in () if batch else self._parameters.values():
            if parameter.default is not parameter.empty:
                self._defaults[parameter.name] = _in_json(parameter.default)

    def check(self, unique: Unique) -> None:
        """Raise `ConfigurationError` if the key depends on an argument that the function does not have."""
        if unique.by == "all" or self._batch:
            return
        if any(each.kind is each.VAR_KEYWORD for each in self._parameters.values()):
            return
        for name in unique.by:
            if name not in self._parameters:
                known = nearest_first(name, [*self._parameters]) if self._parameters else "none"
                raise ConfigurationError(
                    f"unique.by of the task {self._name!r}: got {name!r}, which is no argument of its function; it has "
                    f"{known}"
                )

    def key(
        self,
        unique: Unique,
        text: bytes,
        tenant: str | None,
        instants: Collection[str] = (),
        digest: Callable[[bytes], bytes] = sha256,
    ) -> UniqueKey:
        """Return the unique key of a call; an argument that is not given counts as its default.

        ``digest`` is that of a codec. Raises `InvalidInput` if the key depends on one of the arguments ``instants``,
        which are not known yet.
        """
        if instants and (unique.by == "all" or not set(instants).isdisjoint(unique.by)):
            raise InvalidInput(
                "unique",
                "a unique key that depends on Instant",
                "Unique(by=...) without this argument, or using(unique=None): "
                "each instant of a schedule has one task in any case",
            )
        arguments = json.loads(text)
        if not self._batch:
            arguments = {**self._defaults, **arguments}
        return unique.key(self._name, arguments, tenant, digest)


def _in_json(default: Any) -> Any:
    with suppress(PydanticSerializationError, ValueError):
        return json.loads(_ANYTHING.dump_json(default))
    return None
