"""Payloads become arguments, or a fault that names fields and shows no values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import Context
from taskqueue_worker.arguments import Arguments, InvalidPayload
from tests.worker.fake import work


class Order(BaseModel):
    """A model."""

    id: int
    tags: list[str] = []


CONTEXT = Context(work(), lambda _receipt, _value: None)


def read(function: Callable[..., Any], payload: object) -> dict[str, Any]:
    """Read a payload for a function."""
    arguments = Arguments(function)
    return arguments.of([arguments.read(msgspec.json.encode(payload))], [CONTEXT])


def fault(function: Callable[..., Any], payload: object) -> str:
    """Return the fault of a payload."""
    with pytest.raises(InvalidPayload) as caught:
        read(function, payload)
    return str(caught.value)


def two(a: int, b: str = "b") -> None:
    """Take two, one of them optional."""


def one(value: list[int]) -> None:
    """Take one."""


def none() -> None:
    """Take nothing."""


def anything(value) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case
    """Take one of any kind."""


def with_context(order: Order, context: Context, *, at: datetime | None = None) -> None:
    """Take a model, and the context."""


def extras(a: int, **more: int) -> None:
    """Take whatever comes."""


def constrained(n: Annotated[int, Field(gt=0)], kind: Literal["x", "y"] = "x") -> None:
    """Take a small range."""


def awkward(copy: int, _hidden: int, model_config: int) -> None:
    """Take names that a model could not have."""


def optional(a: int = 1, b: int = 2) -> None:
    """Take nothing, if need be."""


def test_an_object_is_spread_by_name() -> None:
    """Defaults may be left out; types are read as JSON is."""
    assert read(two, {"a": 1}) == {"a": 1}
    assert read(two, {"a": "7", "b": "c"}) == {"a": 7, "b": "c"}
    found = read(with_context, {"order": {"id": 3}, "at": "2026-01-02T03:04:05Z"})
    assert found["order"] == Order(id=3)
    assert found["at"].year == 2026
    assert found["context"] is CONTEXT
    assert read(awkward, {"copy": 1, "_hidden": 2, "model_config": 3})["model_config"] == 3
    assert read(extras, {"a": 1, "b": 2}) == {"a": 1, "b": 2}


def test_anything_else_goes_to_the_only_parameter() -> None:
    """A list, a number, a text or null; where there is no parameter, only null and {} will do."""
    assert read(one, [1, 2]) == {"value": [1, 2]}
    assert read(one, {"value": [1]}) == {"value": [1]}
    assert read(anything, None) == {"value": None}
    assert read(anything, "text") == {"value": "text"}
    assert read(none, None) == {}
    assert read(none, {}) == {}
    assert read(optional, None) == {}
    assert Arguments(one).read(b" [1]") == {"value": [1]}
    assert Arguments(two).read(b' {"a":1}') == {"a": 1}


def test_faults_name_fields_and_no_values() -> None:
    """Fault F20: the text is short, whatever was sent."""
    assert fault(two, {"b": 5}) == "a is missing; b does not fit: string_type"
    assert fault(two, {"a": 1, "c": "secret"}) == "c is not a parameter"
    assert fault(one, "secret") == "payload does not fit: list_type"
    assert fault(one, {"value": [1, "secret"]}) == "value.1 does not fit: int_parsing"
    assert fault(none, 5) == "payload does not fit: dict_type"
    assert fault(two, None) == "a is missing"
    assert fault(constrained, {"n": 0}) == "n does not fit: greater_than"
    assert fault(constrained, {"n": 1, "kind": "secret"}) == "kind does not fit: literal_error"
    assert fault(with_context, {"order": {"id": "secret"}}) == "order.id does not fit: int_parsing"
    assert fault(with_context, {"order": {"id": 1}, "context": {}}) == "context is not a parameter"
    many = fault(two, {"a": 1} | {f"k{n}" * 100: "secret" for n in range(50)})
    assert len(many) < 2000
    assert many.endswith("and 40 more")
    assert "secret" not in many


def test_partials_methods_and_callables_are_handlers_too() -> None:
    """Whatever has a readable signature."""

    class Service:
        def method(self, n: int) -> int:
            return n

        def __call__(self, n: int) -> int:
            return n

    for function in (Service().method, Service()):
        assert read(function, {"n": 1}) == {"n": 1}
    assert read(partial(two, b="fixed"), {"a": 1}) == {"a": 1}


def positional(a: int, /) -> None:
    """Cannot be called by name."""


def starred(*values: int) -> None:
    """Cannot be called by name."""


def unresolved(a: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821 - that is the case
    """Have an annotation that nobody knows."""


def unsupported(a: Callable[[Field], int] | object() = 1) -> None:  # type: ignore[valid-type]
    """Have an annotation that is no type."""


def old_style(a: int = Field(gt=0)) -> None:
    """Have pydantic's default for models, which means nothing here."""


@pytest.mark.parametrize("function", [positional, starred, unresolved, unsupported, old_style])
def test_signatures_that_cannot_be_served_are_refused(function: Callable[..., Any]) -> None:
    """At registration, not at the first task."""
    with pytest.raises(ConfigurationError, match=f"^{function.__name__} cannot be a task handler"):
        Arguments(function)
