"""Encoding the arguments of a step of a workflow, some of which become the results of other steps."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from taskqueue_core.application.arguments import Arguments, BatchArguments
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.application.outputs import Output, has_outputs
from taskqueue_core.application.type_errors import without_mark
from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.limits import check_json
from taskqueue_core.workflows import count_references, input_reference

_ALLOWED = "the output of a step as a whole argument, or as an item of a list or a dict"


def write_with_outputs(
    arguments: Arguments | BatchArguments,
    task: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: str,
) -> tuple[bytes, tuple[Output, ...]]:
    """Encode arguments with references in place of outputs, and return those of different steps, in order.

    An argument with an output is not checked before the worker has the result. Raises `InvalidArguments`, `TooLarge`.
    """
    if isinstance(arguments, BatchArguments):
        raise InvalidArguments(
            task, "the output of a step in a batch", "outputs in the call of a single task"
        )
    bound = arguments.bind(task, args, kwargs)
    with_output = {name for name, value in bound.items() if has_outputs(value)}
    rest = {name: value for name, value in bound.items() if name not in with_output}
    text = arguments.write_without(task, rest, frozenset(with_output), limit)
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    writer = _Writer(task)
    for name in bound:
        if name in with_output:
            _check_name(arguments, task, name)
            members[name] = msgspec.Raw(writer.write(name, bound[name]))
    payload = msgspec.json.encode(members)
    try:
        check_json("arguments", payload, limit)
    except TooLarge:
        raise
    except InvalidInput as error:
        raise InvalidArguments(task, f"arguments: {error.got}", error.allowed) from None
    if count_references(payload) != writer.written:
        raise InvalidArguments(
            task,
            "an object whose only member is '$input', as a reference to an output has",
            "others",
        )
    return payload, tuple(writer.outputs)


class _Writer:
    def __init__(self, task: str) -> None:
        self._task = task
        self._numbers: dict[int, int] = {}
        self.outputs: list[Output] = []
        self.written = 0

    def write(self, name: str, value: object) -> bytes:
        try:
            return to_json(
                value, inf_nan_mode="constants", bytes_mode="base64", fallback=self._reference
            )
        except (PydanticSerializationError, TypeError, ValueError):
            raise InvalidArguments(
                self._task, f"{name} has no equivalent in JSON", _ALLOWED
            ) from None

    def _reference(self, value: object) -> dict[str, int]:
        if not isinstance(value, Output):
            raise TypeError("no equivalent in JSON")
        number = self._numbers.setdefault(id(value.step), len(self.outputs))
        if number == len(self.outputs):
            self.outputs.append(value)
        self.written += 1
        return input_reference(number)


def _check_name(arguments: Arguments, task: str, name: str) -> None:
    """Raise `InvalidArguments` if a parameter has another name in JSON."""
    for part in getattr(without_mark(arguments.fields.get(name)), "__metadata__", ()):
        if isinstance(part, FieldInfo) and (part.alias or part.validation_alias):
            raise InvalidArguments(task, f"{name} has another name in JSON", "no output for it")
