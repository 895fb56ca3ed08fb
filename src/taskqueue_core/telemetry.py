"""OpenTelemetry, where the program has set a provider: spans and metrics by its conventions for messaging.

Its package is optional. Without it, or without a provider, nothing is done, and nothing of it is imported. A task
carries its publisher's context in the headers ``traceparent`` and ``tracestate``. No span or metric holds a payload, a
token or an error's text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING

from taskqueue_core.tasks import Task

if TYPE_CHECKING:
    from taskqueue_core.spans import Carrier, Operation


_nothing = nullcontext()
_REFRESH_SECONDS = 0.5
_APIS = ("opentelemetry.trace", "opentelemetry.metrics")


class _Provider:
    """Whether there is one. It is set once, and for good."""

    def __init__(self) -> None:
        self.is_set = False
        self.next_refresh = 0.0

    def refresh(self, now: float) -> bool:
        # The API takes some microseconds to say that there is none, which a batch of one task would feel.
        self.next_refresh = now + _REFRESH_SECONDS
        if any(module in sys.modules for module in _APIS):
            self.is_set = _spans().listening()
        return self.is_set


_provider = _Provider()


@cache
def _spans() -> ModuleType:
    from taskqueue_core import spans  # noqa: PLC0415 - imported only if a provider is set

    return spans


def active() -> bool:
    """Whether the program has set a provider of spans or metrics."""
    return _provider.is_set or (
        (now := monotonic()) >= _provider.next_refresh and _provider.refresh(now)
    )


def publishing(tasks: tuple[Task, ...]) -> AbstractContextManager[tuple[Task, ...]]:
    """Observe a publish. Gives the tasks to publish: each that had no context yet has that of this span.

    Where all have one their publisher has done it already, and nothing is added.
    """
    if not tasks or not active():
        return nullcontext(tasks)
    observed: AbstractContextManager[tuple[Task, ...]] = _spans().publishing(tasks)
    return observed


def operation(name: str, tasks: Sequence[Carrier] = ()) -> AbstractContextManager[Operation | None]:
    """Observe a call that receives (give it what came, as its ``tasks``) or settles. ``name``: receive, or a verb."""
    if not active():
        return _nothing
    observed: Operation = _spans().Operation(name, tasks)
    return observed


def processing(tasks: Sequence[Carrier]) -> AbstractContextManager[None]:
    """Observe a handler: a span that is current in it, with links to the spans of the publishers.

    That of a single task is also the child of its publisher's.
    """
    if not active():
        return _nothing
    observed: AbstractContextManager[None] = _spans().Processing(tasks)
    return observed


def consumed(tasks: Sequence[Carrier]) -> None:
    """Count tasks that were pushed to this program."""
    if active():
        _spans().consumed(tasks)
