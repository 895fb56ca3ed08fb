"""The exception classes: their hierarchy, their codes and their messages."""

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
    """Return each error class in the tree of the module's docstring, with the class above it in that tree."""
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
    """The tree in the module's docstring shows every error class below its real base class."""
    real = {
        name: next((base.__name__ for base in kind.__bases__ if base.__name__ in CLASSES), None)
        for name, kind in CLASSES.items()
    }
    assert drawn() == real


def test_all_are_public() -> None:
    """Every error class is exported by the module."""
    assert sorted(errors.__all__) == sorted(CLASSES)


def test_codes_are_distinct_short_words() -> None:
    """Each error class has its own code, in lower-case words, by which programs can distinguish errors."""
    codes = [kind.code for kind in CLASSES.values()]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_travel_between_processes(name: str) -> None:
    """An error that is pickled or copied keeps its type, message and attributes.

    This lets it cross process boundaries.
    """
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
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - the pickle was made here
        assert type(copied) is kind
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


def test_what_invalid_input_says() -> None:
    """An `InvalidInput` error gives the field, the type received and the values allowed, as text and as attributes."""
    error = InvalidInput("priority", "str", "0 to 9")
    assert str(error) == "priority: got str; allowed: 0 to 9"
    assert (error.field, error.got, error.allowed) == ("priority", "str", "0 to 9")
    assert isinstance(error, ValueError)
