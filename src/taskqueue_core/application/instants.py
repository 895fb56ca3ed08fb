"""Arguments of a scheduled call that become the instant for which the schedule fires."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from taskqueue_core.application.arguments import Arguments, BatchArguments
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.schedules import InstantForm, is_instant, text_of

_SAMPLE = 946_730_096.0
_FORMS: tuple[tuple[Any, InstantForm], ...] = (
    (datetime.fromtimestamp(_SAMPLE, UTC), "text"),
    (_SAMPLE, "seconds"),
    (text_of(_SAMPLE), "text"),
)
"""values that an instant can have, with their forms in JSON: the first that the parameter accepts is taken"""
_ALLOWED = "Instant for a parameter that is a datetime, a number or text"


def write_with_instants(
    arguments: Arguments | BatchArguments,
    task: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: str,
) -> tuple[bytes, Mapping[str, InstantForm]]:
    """Encode arguments without those that are `Instant`, and return the forms of these by their names.

    Raises `InvalidArguments`, also if a parameter accepts no form of an instant.
    """
    if isinstance(arguments, BatchArguments):
        raise InvalidArguments(
            task, "Instant in a batch", "Instant as an argument of a single task"
        )
    bound = arguments.bind(task, args, kwargs)
    forms: dict[str, InstantForm] = {}
    for name in [name for name, value in bound.items() if is_instant(value)]:
        for sample, form in _FORMS:
            if arguments.accepts(name, sample):
                bound[name] = sample
                forms[name] = form
                break
        else:
            raise InvalidArguments(task, f"{name} cannot be an instant", _ALLOWED)
    members = msgspec.json.decode(
        arguments.write(task, (), bound, limit), type=dict[str, msgspec.Raw]
    )
    if missing := forms.keys() - members.keys():
        raise InvalidArguments(task, f"{min(missing)} has another name in JSON", _ALLOWED)
    for name in forms:
        del members[name]
    return msgspec.json.encode(members), forms
