"""What a task waits for: the checks of the field ``after``, and backends that cannot let a task wait."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_core.after import After, TaskRef
from taskqueue_core.authoring.unsupported import reject_after
from taskqueue_core.errors import CapabilityMissing, InvalidInput
from taskqueue_core.tasks import Task

A, B = TaskRef("k", "a"), TaskRef("k", "b")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tasks": ()}, "after.tasks"),
        ({"tasks": [A]}, "after.tasks"),
        ({"tasks": ("a",)}, "after.tasks"),
        ({"tasks": (A, A)}, "after.tasks"),
        ({"tasks": tuple(TaskRef("k", str(n)) for n in range(1001))}, "after.tasks"),
        ({"tasks": (A,), "when": "never"}, "after.when"),
        ({"tasks": (A,), "on_dead": "wait"}, "after.on_dead"),
        ({"tasks": (A,), "inputs": (1,)}, "after.inputs"),
        ({"tasks": (A,), "inputs": (-1,)}, "after.inputs"),
        ({"tasks": (A,), "inputs": (True,)}, "after.inputs"),
        ({"tasks": (A, B), "inputs": (0, 0)}, "after.inputs"),
        ({"tasks": (A, B), "inputs": [0]}, "after.inputs"),
    ],
)
def test_bad_input(fields: dict[str, Any], field: str) -> None:
    """U16: what a task waits for is checked before anything is stored, and the error names the field."""
    with pytest.raises(InvalidInput) as error:
        After(**fields)
    assert error.value.field == field


@pytest.mark.parametrize("field", ["after", "batch"])
def test_other_values(field: str) -> None:
    """U16: the fields of a task accept only their types."""
    fields: dict[str, Any] = {field: ("k", "a")}
    with pytest.raises(InvalidInput) as error:
        Task(key="k", **fields)
    assert error.value.field == field


def test_no_task_waits_for_itself() -> None:
    """U16: a task that would wait for itself is refused."""
    with pytest.raises(InvalidInput, match=r"after\.tasks"):
        Task(key="k", id="a", after=After(tasks=(B, A)))


@pytest.mark.parametrize("fields", [{"after": After(tasks=(A,))}, {"batch": A}])
def test_a_backend_that_cannot(fields: dict[str, Any]) -> None:
    """U16: a backend without the capability refuses by its name."""
    reject_after([Task(key="k")])
    with pytest.raises(CapabilityMissing, match="'after'"):
        reject_after([Task(key="k"), Task(key="k", **fields)])
