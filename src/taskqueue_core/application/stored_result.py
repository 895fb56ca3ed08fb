"""Decoding what the store has as the result of a task that is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from taskqueue_core.application.errors import InvalidResult, ResultGone, Undecodable

R = TypeVar("R")


def result_of(key: str, task_id: str, read: Callable[[bytes], R], text: bytes | None) -> R:
    """Decode the stored result of a task, ``None`` if there is none. ``read`` does it by the return annotation.

    Raises `ResultGone`, `InvalidResult` and `Undecodable`, which name the task.
    """
    try:
        return read(b"null" if text is None else text)
    except Undecodable as error:
        raise Undecodable(f"the result of task {task_id} of {key}: {error}") from None
    except ValidationError as error:
        if text is None:
            raise ResultGone(
                f"task {task_id} of {key} is done, but its result is no longer stored, or it returned nothing"
            ) from None
        kinds = "; ".join(fault["type"] for fault in error.errors(include_input=False)[:10])
        raise InvalidResult(
            f"the result of task {task_id} of {key} does not match the return annotation: {kinds}"
        ) from None
