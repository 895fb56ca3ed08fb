"""Tasks and payloads: validated when created, immutable afterwards, and unchanged when they reach the worker."""

import dataclasses
import datetime as dt
import enum
import json
import math
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.errors import InvalidInput
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import (
    Ledger,
    Settled,
    State,
    Task,
    new_id,
)

plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.floats(), inner, max_size=3)
    ),
    max_leaves=8,
)


class Colour(enum.Enum):
    """An enumeration such as an application would put into a payload."""

    RED = "red"


@dataclasses.dataclass
class Order:
    """A dataclass such as an application would put into a payload."""

    number: int
    at: dt.date


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(LIMITS.depth):
    DEEP = [DEEP]


@given(plain_json)
def test_payloads_come_back_exactly(value: object) -> None:
    """Fault K3: any JSON value reaches the worker unchanged, including integers of more than 64 bits and all floats."""
    assert Task.of("k", value).value() == value
    assert json.loads(encode_json("payload", value)) == value


@given(anything)
def test_nothing_is_altered_silently(value: object) -> None:
    """Fault K3: any value is either refused or decoded as an equal value, with tuples as lists."""

    def as_lists(of: object) -> object:
        if isinstance(of, dict):
            return {key: as_lists(inner) for key, inner in of.items()}
        return [as_lists(inner) for inner in of] if isinstance(of, list | tuple) else of

    try:
        text = encode_json("payload", value)
    except InvalidInput:
        return
    assert json.loads(text) == as_lists(value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        [1, [None, math.nan]],
        b"bytes",
        bytearray(b"bytes"),
        {1: "a"},
        {math.nan: "a"},
        {True: "a"},
        {"a": {2: 3}},
        "\ud800",
        {"\udfff": 1},
        CYCLE,
        DEEP,
        object(),
        msgspec.Raw(b"{bad"),
        10**5000,
        "x" * (LIMITS.payload - 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_say(value: object) -> None:
    """Fault K3: values without a JSON form, such as NaN, bytes and non-string keys, are refused, not converted."""
    with pytest.raises(InvalidInput, match=r"^result: got ") as caught:
        encode_json("result", value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, b"null"),
        ([None, "null", "nan"], b'[null,"null","nan"]'),
        ((1, (2,)), b"[1,[2]]"),
        ([None, (1, {"a": ()})], b'[null,[1,{"a":[]}]]'),
        ({1}, b"[1]"),
        (Colour.RED, b'"red"'),
        (Order(7, dt.date(2026, 1, 2)), b'{"number":7,"at":"2026-01-02"}'),
        (uuid.UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (DEEP[0], b"[" * LIMITS.depth + b"]" * LIMITS.depth),
        ("x" * (LIMITS.payload - 2), b'"' + b"x" * (LIMITS.payload - 2) + b'"'),
        (-0.0, b"-0.0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_can_say(value: object, text: bytes) -> None:
    """Dates, UUIDs, enumerations and dataclasses are encoded in their usual JSON form, tuples and sets as arrays."""
    assert encode_json("payload", value) == text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", ""),
        ("id", None),
        ("tenant", "../x"),
        ("ordering_key", "\u0430"),
        ("payload", b""),
        ("payload", b"NaN"),
        ("payload", b'"' + b"x" * LIMITS.payload + b'"'),
        ("headers", {"a": "\n"}),
        ("headers", None),
        ("headers", dict.fromkeys(map(str, range(LIMITS.headers + 1)), "")),
        ("priority", -1),
        ("priority", 10),
        ("priority", 1.0),
        ("priority", True),
        ("deadline", math.nan),
        ("deadline", 10**400),
        ("not_before", -0.1),
        ("not_before", "soon"),
        ("max_attempts", 0),
        ("max_attempts", 1001),
        ("max_attempts", 1.0),
        ("max_attempts", True),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_an_invalid_task_cannot_exist(field: str, value: object) -> None:
    """Faults K2, K3 and K4: creating a task with an invalid field raises an error that names the field."""
    fields: dict[str, Any] = {"key": "k", field: value}
    with pytest.raises(InvalidInput, match=rf"^{field}: got ") as caught:
        Task(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 0),
        ("priority", 9),
        ("max_attempts", 1),
        ("max_attempts", 1000),
        ("deadline", 0),
        ("deadline", 253_402_300_799),
        ("not_before", 0.5),
        ("payload", b"0"),
        ("headers", {"traceparent": "00-ab-cd-01"}),
        ("tenant", "t" * LIMITS.name),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_the_edges_are_inside(field: str, value: object) -> None:
    """Fault K4: the lowest and highest allowed value of each field are accepted."""
    fields: dict[str, Any] = {"key": "k", field: value}
    assert getattr(Task(**fields), field) == value


def test_tasks_are_frozen() -> None:
    """A task is immutable, and changing the dict passed as headers does not change the task."""
    headers = {"a": "1"}
    task = Task(key="k", headers=headers)
    headers["b"] = "\n"
    assert task.headers == {"a": "1"}
    with pytest.raises(AttributeError):
        task.key = "other"  # type: ignore[misc]


@pytest.mark.parametrize("payload", [b"1e999", b"-1e999", b"1" * 5000])
def test_numbers_that_python_cannot_hold(payload: bytes) -> None:
    """Fault K3: decoding a JSON number that Python cannot represent raises `InvalidInput`."""
    with pytest.raises(InvalidInput, match=r"^payload: "):
        Task(key="k", payload=payload).value()


def test_ids_are_unguessable_names() -> None:
    """Each new task id is different and has 128 bits, so that ids cannot be guessed."""
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(bytes.fromhex(task_id)) for task_id in ids} == {16}


def test_defaults() -> None:
    """A task needs only a queue key; all other fields have defaults."""
    task = Task(key="k")
    assert (task.value(), task.priority, task.headers, task.max_attempts) == (None, 5, {}, None)
    assert task.id != Task(key="k").id


@pytest.mark.parametrize("settled", list(Settled))
def test_settled(settled: Settled) -> None:
    """Every settlement result except ``LEASE_LOST`` means that the settlement took effect (law 2)."""
    assert settled.ok == (settled is not Settled.LEASE_LOST)


counts = st.integers(0, 10**9)
ledgers = st.builds(Ledger, **dict.fromkeys(Ledger.__struct_fields__, counts))


@given(ledgers, ledgers)
def test_ledgers_add_up(one: Ledger, other: Ledger) -> None:
    """Law 1: the imbalance of a sum of ledgers is the sum of their imbalances.

    So balanced ledgers have a balanced sum.
    """
    total = one + other
    assert total.imbalance == one.imbalance + other.imbalance
    assert total.balanced == (total.imbalance == 0)
    assert total == other + one


def test_the_ledger_counts_every_state() -> None:
    """Law 1: a ledger has one count for each state, and a published task in any state balances it."""
    assert set(Ledger.__struct_fields__) == {"published", *(state.value for state in State)}
    for state in State:
        assert Ledger(published=1, **{state.value: 1}).balanced
        assert Ledger(**{state.value: 1}).imbalance == -1
