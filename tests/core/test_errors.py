"""The errors: their hierarchy, their codes and what they say."""

import copy
import inspect
import pickle

import pytest

from taskqueue_core import errors
from taskqueue_core.errors import (
    InvalidInput,
    ProtocolViolation,
    PublishError,
    TaskQueueError,
)

CLASSES: dict[str, type[TaskQueueError]] = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, TaskQueueError)
}


def drawn() -> dict[str, str | None]:
    """Each error of the drawing in the module's docstring, with the one above it."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        found = line.lstrip(" │├└─")
        depth = (len(line) - len(found)) // 4 - 1
        if not line.startswith("    ") or not found:
            continue
        name = found.split()[0]
        path[depth:] = [name]
        parents[name] = path[depth - 1] if depth else None
    return parents


def test_the_drawing_is_the_hierarchy() -> None:
    """The docstring draws every error, each below its real parent."""
    real = {
        name: next((base.__name__ for base in kind.__bases__ if base.__name__ in CLASSES), None)
        for name, kind in CLASSES.items()
    }
    assert drawn() == real


def test_all_are_public() -> None:
    """Whoever can meet an error can import it."""
    assert sorted(errors.__all__) == sorted(CLASSES)


def test_codes_are_distinct_short_words() -> None:
    """Machines can tell errors apart by their code."""
    codes = [kind.code for kind in CLASSES.values()]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_travel_between_processes(name: str) -> None:
    """An error comes out of a pool of processes as it went in."""
    kind = CLASSES[name]
    error: TaskQueueError
    if issubclass(kind, InvalidInput):
        error = kind("field", "int", "text")
    elif issubclass(kind, ProtocolViolation):
        error = kind("rule", "message", fatal=False)
    elif issubclass(kind, PublishError):
        error = kind("message", task_id="t")
    else:
        error = kind("message")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - ours
        assert type(copied) is kind
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


def test_what_invalid_input_says() -> None:
    """It names the field, what came and what is allowed, for people and for programs."""
    error = InvalidInput("priority", "str", "0 to 9")
    assert str(error) == "priority: got str; allowed: 0 to 9"
    assert (error.field, error.got, error.allowed) == ("priority", "str", "0 to 9")
    assert isinstance(error, ValueError)
