"""Spans and metrics that follow OpenTelemetry's conventions for messaging, if the program has set a provider.

The package ``opentelemetry`` is optional. Without it, or without a provider, nothing is recorded and the package is not
imported. A task carries its publisher's trace context in the headers ``traceparent`` and ``tracestate``. No span or
metric contains a payload, a token or the text of an error.
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
    """Remembers whether the program has set a provider. Once it has, there are no further checks."""

    def __init__(self) -> None:
        self.is_set = False
        self.next_refresh = 0.0

    def refresh(self, now: float) -> bool:
        # The result is cached, because a check takes a few microseconds, which is too long for every single publish.
        self.next_refresh = now + _REFRESH_SECONDS
        if any(module in sys.modules for module in _APIS):
            self.is_set = _spans().listening()
        return self.is_set


_provider = _Provider()


@cache
def _spans() -> ModuleType:
    from taskqueue_core import spans  # noqa: PLC0415 - imported only if the program uses OpenTelemetry

    return spans


def active() -> bool:
    """Return whether the program has set a provider of spans or metrics."""
    return _provider.is_set or (
        (now := monotonic()) >= _provider.next_refresh and _provider.refresh(now)
    )


def publishing(tasks: tuple[Task, ...]) -> AbstractContextManager[tuple[Task, ...]]:
    """Record a span and metrics of a publish. Yields the tasks; those without a trace context get that of the span.

    If all tasks already have a trace context, their publisher has recorded them, so nothing more is recorded.
    """
    if not tasks or not active():
        return nullcontext(tasks)
    observed: AbstractContextManager[tuple[Task, ...]] = _spans().publishing(tasks)
    return observed


def operation(name: str, tasks: Sequence[Carrier] = ()) -> AbstractContextManager[Operation | None]:
    """Record a receive, settlement or retry. Yields ``None``, or an `Operation` whose ``tasks`` a receive must set."""
    if not active():
        return _nothing
    observed: Operation = _spans().Operation(name, tasks)
    return observed


def processing(tasks: Sequence[Carrier]) -> AbstractContextManager[None]:
    """Record a span that is current while a handler runs, with links to the spans of the tasks' publishers.

    If there is only one task, the span is also a child of its publisher's span.
    """
    if not active():
        return _nothing
    observed: AbstractContextManager[None] = _spans().processing(tasks)
    return observed


def consumed(tasks: Sequence[Carrier]) -> None:
    """Count tasks that a server has sent to this program."""
    if active():
        _spans().consumed(tasks)
