"""The base class of policies that programs write in Python, next to the tasks that they concern."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from taskqueue_core.errors import ConfigurationError

if TYPE_CHECKING:
    _Base = BaseModel
else:

    class _Constructor(type(BaseModel)):
        """Makes a constructor raise `ConfigurationError`. Values in JSON are not passed to a constructor."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                what = describe(error, cls.model_fields)
                raise ConfigurationError(f"{cls.__name__}: {what}") from None

    class _Base(BaseModel, metaclass=_Constructor):
        """A model with this constructor."""


class PolicyModel(_Base):
    """A model whose constructor raises `ConfigurationError` that names the field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def nearest_first(name: str, known: Iterable[str], limit: int | None = None) -> str:
    """Return the names that exist as text, first those that are most like a misspelt name; ``limit`` of them."""
    names = list(known)
    return ", ".join([*dict.fromkeys([*get_close_matches(name, names), *names])][:limit])


def describe(error: ValidationError, fields: Iterable[str]) -> str:
    """Return which field of a model is wrong, and what is allowed. ``fields``: the names of all fields."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return f"there is no field {field!r}; the fields are {nearest_first(field, fields)}"
    allowed = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if not field:
        return allowed
    return f"{field} {allowed}" if allowed.startswith("must be") else f"{field}: {allowed}"
