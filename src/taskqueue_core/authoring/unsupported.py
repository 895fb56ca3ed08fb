"""Checks that refuse the fields of tasks which a backend does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.errors import CapabilityMissing, InvalidInput
from taskqueue_core.tasks import Task


def reject_ordering_keys(tasks: Iterable[Task]) -> None:
    """Raise `InvalidInput` if a task has an ordering key. Backends without ``ordering_keys`` call it in `publish`."""
    for task in tasks:
        if task.ordering_key is not None:
            raise InvalidInput(
                "ordering_key", "a key", "none, because this backend does not support ordering keys"
            )


def reject_unique_keys(tasks: Iterable[Task]) -> None:
    """Raise `CapabilityMissing` if a task has a unique key. Backends without ``unique`` call it in `publish`."""
    for task in tasks:
        if task.unique is not None:
            raise CapabilityMissing(
                f"the task {task.id!r} has a unique key, and the backend does not have the capability 'unique': "
                "publish it without the key, or use a backend that has the capability"
            )


def reject_after(tasks: Iterable[Task]) -> None:
    """Raise `CapabilityMissing` if a task waits for others or has a batch. Backends without ``after`` call it."""
    for task in tasks:
        if task.after is not None or task.batch is not None:
            field = "batch" if task.after is None else "after"
            raise CapabilityMissing(
                f"the backend does not have the capability 'after', so a task cannot have the field {field!r}"
            )


_CHECKS: dict[Capability, Callable[[Iterable[Task]], None]] = {
    Capability.ORDERING_KEYS: reject_ordering_keys,
    Capability.UNIQUE: reject_unique_keys,
    Capability.AFTER: reject_after,
}


def field_checks(capabilities: Capabilities) -> tuple[Callable[[Iterable[Task]], None], ...]:
    """Return the checks that tasks need before a backend with these capabilities stores them: none if it has all."""
    return tuple(check for name, check in _CHECKS.items() if name not in capabilities.names)
