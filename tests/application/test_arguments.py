"""Payloads are converted to arguments of a handler; errors name the fields but never contain values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, Required, TypedDict, Unpack

import msgspec
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType

from taskqueue_core import InvalidArguments, Tasks
from taskqueue_core.application.arguments import Arguments, InvalidPayload
from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import Context
from tests.worker.fake import work


class Order(BaseModel):
    """A model as the type of a parameter."""

    id: int
    tags: list[str] = []


CONTEXT = Context(work(), lambda _receipt, _value: None)


def read(function: Callable[..., Any], payload: object) -> dict[str, Any]:
    """Return the arguments of a function for a payload."""
    arguments = Arguments(function)
    return arguments.of([arguments.read(msgspec.json.encode(payload))], [CONTEXT])


def fault(function: Callable[..., Any], payload: object) -> str:
    """Return the error text for an invalid payload."""
    with pytest.raises(InvalidPayload) as caught:
        read(function, payload)
    return str(caught.value)


def two(a: int, b: str = "b") -> None:
    """A handler with two parameters, one of them optional."""


def one(value: list[int]) -> None:
    """A handler with one parameter."""


def none() -> None:
    """A handler without parameters."""


def anything(value) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case
    """A handler with one parameter of any type."""


def with_context(order: Order, context: Context, *, at: datetime | None = None) -> None:
    """A handler with a model, a context and a keyword-only parameter."""


def extras(a: int, **more: int) -> None:
    """A handler with additional keyword arguments."""


class Options(TypedDict, total=False):
    """Keyword arguments with names."""

    height: int
    name: Required[Annotated[str, Field(max_length=3)]]


def unpacked(a: int, **options: Unpack[Options]) -> None:
    """A handler whose additional keyword arguments have names."""


def constrained(n: Annotated[int, Field(gt=0)], kind: Literal["x", "y"] = "x") -> None:
    """A handler whose parameters have constraints."""


def awkward(copy: int, _hidden: int, model_config: int) -> None:
    """A handler whose parameter names would be invalid as field names of a model."""


def optional(a: int = 1, b: int = 2) -> None:
    """A handler with only optional parameters."""


NO_NUMBER = "should be a valid integer, unable to parse string as an integer"


def test_an_object_is_spread_by_name() -> None:
    """The fields of a JSON object become arguments by name, with defaults and JSON conversions."""
    assert read(two, {"a": 1}) == {"a": 1}
    assert read(two, {"a": "7", "b": "c"}) == {"a": 7, "b": "c"}
    found = read(with_context, {"order": {"id": 3}, "at": "2026-01-02T03:04:05Z"})
    assert found["order"] == Order(id=3)
    assert found["at"].year == 2026
    assert found["context"] is CONTEXT
    assert read(awkward, {"copy": 1, "_hidden": 2, "model_config": 3})["model_config"] == 3
    assert read(extras, {"a": 1, "b": 2}) == {"a": 1, "b": 2}


def test_additional_keyword_arguments() -> None:
    """U1: they are validated by the annotation of the ** parameter, when they are published and when they are read."""
    assert read(extras, {"a": 1, "b": "2"}) == {"a": 1, "b": 2}
    assert fault(extras, {"a": 1, "b": "secret"}) == f"b {NO_NUMBER}"
    with pytest.raises(InvalidArguments, match=f"b {NO_NUMBER}"):
        Arguments(extras).write("t", (1,), {"b": "x"})
    assert Arguments(extras).schema()["additionalProperties"] == {"type": "integer"}
    assert read(unpacked, {"a": 1, "height": "2", "name": "x"})["height"] == 2
    assert fault(unpacked, {"a": 1, "height": "secret"}) == f"height {NO_NUMBER}; name is missing"
    assert fault(unpacked, {"a": 1, "name": "x", "c": 1}) == "c is not a parameter"


def test_anything_else_goes_to_the_only_parameter() -> None:
    """A payload that is no object becomes the only argument.

    A handler without required parameters also accepts null and {}.
    """
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
    """Fault F20: the error names the invalid fields, contains no values, and is short for any payload."""
    assert fault(two, {"b": 5}) == "a is missing; b should be a valid string"
    assert fault(two, {"a": 1, "c": "secret"}) == "c is not a parameter"
    assert fault(one, "secret") == "payload should be a valid array"
    assert fault(one, {"value": [1, "secret"]}) == f"value.1 {NO_NUMBER}"
    assert fault(none, 5) == "payload should be an object"
    assert fault(two, None) == "a is missing"
    assert fault(constrained, {"n": 0}) == "n should be greater than 0"
    assert fault(constrained, {"n": 1, "kind": "secret"}) == "kind should be 'x' or 'y'"
    assert fault(with_context, {"order": {"id": "secret"}}) == f"order.id {NO_NUMBER}"
    assert fault(with_context, {"order": {"id": 1}, "context": {}}) == "context is not a parameter"
    many = fault(two, {"a": 1} | {f"k{n}" * 100: "secret" for n in range(50)})
    assert len(many) < 2000
    assert many.endswith("and 40 more")
    assert "secret" not in many


def test_partials_methods_and_callables_are_handlers_too() -> None:
    """Bound methods, callable objects and partial functions can be handlers."""

    class Service:
        def method(self, n: int) -> int:
            return n

        def __call__(self, n: int) -> int:
            return n

    for function in (Service().method, Service()):
        assert read(function, {"n": 1}) == {"n": 1}
    assert read(partial(two, b="fixed"), {"a": 1}) == {"a": 1}


def positional(a: int, /) -> None:
    """A handler with a positional-only parameter, which cannot be passed by name."""


def starred(*values: int) -> None:
    """A handler with variable positional parameters, which cannot be passed by name."""


def unresolved(a: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821 - that is the case
    """A handler whose annotation is an undefined name."""


def unsupported(a: Callable[[Field], int] | object() = 1) -> None:  # type: ignore[valid-type]
    """A handler whose annotation is not a type."""


def old_style(a: int = Field(gt=0)) -> None:
    """A handler whose default value is a pydantic field, which works only in models."""


@pytest.mark.parametrize("function", [positional, starred, unresolved, unsupported, old_style])
def test_signatures_that_cannot_be_served_are_refused(function: Callable[..., Any]) -> None:
    """A function whose signature cannot be used for a handler is refused when it is registered."""
    with pytest.raises(ConfigurationError, match=f"^{function.__name__} cannot be a task handler"):
        Arguments(function)


class Opaque:
    """A class of which pydantic knows nothing."""


def opaque(a: int, b: Opaque | None = None) -> None:
    """A handler with a type that has no JSON form."""


def test_a_type_without_json_is_named() -> None:
    """U1: the error at import names the parameter and its type, and what to use instead."""
    with pytest.raises(ConfigurationError) as caught:
        Arguments(opaque)
    assert "parameter 'b' has the type tests.application.test_arguments.Opaque | None" in str(
        caught.value
    )
    assert "use a model, a dataclass" in str(caught.value)
    assert len(str(caught.value)) < 300


Circle = dict[str, "Circle"]
Json = TypeAliasType("Json", "int | list[Json]")


def test_types_that_refer_to_themselves() -> None:
    """U1: an alias that refers to itself by name is refused at import, with what to write; a type statement works."""

    def circle(one: int, place: Circle | None = None) -> None: ...
    def result() -> Circle:
        return {}

    def batch(places: list[Circle]) -> None: ...
    def json(value: Json) -> None: ...

    for function, subject in (
        (circle, "parameter 'place'"),
        (result, "its result"),
        (batch, "parameter 'places'"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            Tasks().task("work", batch=2 if function is batch else None)(function)
        text = str(caught.value)
        assert f"the type of {subject} refers to 'Circle'" in text
        assert "write 'type Circle = ...'" in text
    assert Arguments(json).read(b'{"value": [1, [2]]}') == {"value": [1, [2]]}


def test_a_type_without_a_schema() -> None:
    """U2: the error of a schema names the task and the parameter; the task can be published."""
    tasks = Tasks(prefix="shop.")

    @tasks.task
    def call(one: int, back: Callable[[int], int] | None = None) -> None: ...

    @tasks.task(batch=2)
    def many(items: list[Callable[[int], int]]) -> None: ...

    for task, name in ((call, "back"), (many, "items")):
        with pytest.raises(ConfigurationError, match=f"'{task.name}' has no JSON Schema.*'{name}'"):
            task.schema()
    assert call.call(1).payload == b'{"one":1}'
    assert "taskqueue-schema" not in call.headers
    with pytest.raises(InvalidArguments, match="one should be a valid integer"):
        call.call("x")  # type: ignore[arg-type]


def tokens(tokens: dict[str, int], place: dict[str, Order] | None = None) -> None:
    """A handler with dictionaries, whose keys may be confidential."""


def test_keys_of_dictionaries_are_values() -> None:
    """Fault F20: an error shows names of fields, and no key of a dictionary."""
    assert fault(tokens, {"tokens": {"sk-SECRET": "x"}}).startswith("tokens.[key] should be")
    assert fault(tokens, {"tokens": {}, "place": {"sk-SECRET": {"id": "x"}}}).startswith(
        "place.[key].id"
    )
