"""Spans and metrics by OpenTelemetry's conventions for messaging. Imported only by `taskqueue_core.telemetry`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, Self

import msgspec
from opentelemetry import metrics, trace
from opentelemetry.context import attach, detach
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task

_NAME = "taskqueue"
_SDKLESS = ("opentelemetry.trace", "opentelemetry.metrics")
_PARENT = "traceparent"
_log = logging.getLogger("taskqueue.telemetry")
_propagator = TraceContextTextMapPropagator()
_DESTINATION = "messaging.destination.name"
_OF_ONE = {"messaging.message.id", "messaging.batch.message_count"}
MOST_DESTINATIONS = 100
"""maximum number of queues that metrics name; measurements of further queues have no queue name"""
_destinations: set[str] = set()
_LINKS = 128
"""maximum number of links of one span; most telemetry backends drop further links"""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TYPES = {"send": "send", "receive": "receive", "process": "process"}


@contextmanager
def _harmless() -> Iterator[None]:
    # An error in a provider, processor or sampler must not affect the call that is observed.
    try:
        yield
    except Exception:  # noqa: BLE001 - a provider may raise anything; it is logged with its trace
        _log.exception("telemetry failed")


class Carrier(Protocol):
    """The fields that telemetry reads from a task, in the store's form or as sent over a socket."""

    @property
    def key(self) -> str:
        """The name of the task's queue."""
        ...

    @property
    def id(self) -> str:
        """The task's id."""
        ...

    @property
    def headers(self) -> dict[str, str]:
        """The task's headers, which may contain its trace context."""
        ...


def _is_set(provider: object) -> bool:
    # The API's own placeholder for a missing provider records nothing.
    return not type(provider).__module__.startswith(_SDKLESS)


def listening() -> bool:
    """Whether the program has set a provider."""
    return _is_set(trace.get_tracer_provider()) or _is_set(metrics.get_meter_provider())


class _Instruments:
    """The metric instruments of one meter provider."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        meter = provider.get_meter(_NAME)

        def seconds(name: str, description: str) -> metrics.Histogram:
            return meter.create_histogram(
                name,
                unit="s",
                description=description,
                explicit_bucket_boundaries_advisory=_SECONDS,
            )

        self.operations = seconds(
            "messaging.client.operation.duration",
            "Duration of messaging operation initiated by a producer or consumer client.",
        )
        self.process = seconds("messaging.process.duration", "Duration of processing operation.")
        self.sent = meter.create_counter(
            "messaging.client.sent.messages",
            unit="{message}",
            description="Number of messages producer attempted to send to the broker.",
        )
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            unit="{message}",
            description="Number of messages that were delivered to the application.",
        )


@lru_cache(maxsize=4)
def _instruments(provider: metrics.MeterProvider) -> _Instruments:
    return _Instruments(provider)


def _measures() -> _Instruments:
    return _instruments(metrics.get_meter_provider())


def _attributes(name: str, tasks: Sequence[Carrier]) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": _NAME,
        "messaging.operation.name": name,
        "messaging.operation.type": _TYPES.get(name, "settle"),
    }
    keys = {task.key for task in tasks}
    if len(keys) == 1:
        attributes[_DESTINATION] = tasks[0].key
    if len(tasks) == 1:
        attributes["messaging.message.id"] = tasks[0].id
    else:
        attributes["messaging.batch.message_count"] = len(tasks)
    return attributes


def _metric_attributes(attributes: dict[str, Any], error: str | None) -> dict[str, Any]:
    retained = {name: value for name, value in attributes.items() if name not in _OF_ONE}
    if error is not None:
        retained["error.type"] = error
    destination = retained.get(_DESTINATION)
    if destination is not None and destination not in _destinations:
        if len(_destinations) < MOST_DESTINATIONS:
            _destinations.add(destination)
        else:
            del retained[_DESTINATION]
    return retained


def _links(tasks: Iterable[Carrier]) -> list[Link]:
    links: list[Link] = []
    for task in tasks:
        headers = task.headers
        if headers and _PARENT in headers and len(links) < _LINKS:
            span = trace.get_current_span(_propagator.extract(headers)).get_span_context()
            if span.is_valid:
                links.append(trace.Link(span))
    return links


class Operation:
    """A context manager that records a span and metrics of one call to the backend.

    ``tasks`` may be set until the end of the call.
    """

    __slots__ = ("_began", "_name", "_start", "tasks")

    def __init__(self, name: str, tasks: Sequence[Carrier] = ()) -> None:
        """Start the clock. ``name`` is ``send``, ``receive``, or the verb of a settlement."""
        self._name = name
        self.tasks = tasks
        self._began = time.time_ns()
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Record the span and metrics, unless the call concerned no task."""
        if not self.tasks:
            return
        seconds = time.perf_counter() - self._start
        with _harmless():
            self._record(seconds, None if kind is None else kind.__name__)

    def _record(self, seconds: float, error: str | None) -> None:
        attributes = _attributes(self._name, self.tasks)
        destination = attributes.get(_DESTINATION)
        span = trace.get_tracer(_NAME).start_span(
            self._name if destination is None else f"{self._name} {destination}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=_links(self.tasks),
            start_time=self._began,
        )
        _end(span, error)
        measures = _measures()
        labels = _metric_attributes(attributes, error)
        measures.operations.record(seconds, labels)
        if self._name == "receive":
            measures.consumed.add(len(self.tasks), labels)


def _end(span: trace.Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def consumed(tasks: Sequence[Carrier]) -> None:
    """Count tasks that a server has pushed to this program."""
    with _harmless():
        for key, number in Counter(task.key for task in tasks).items():
            attributes = {
                "messaging.system": _NAME,
                "messaging.operation.name": "process",
                _DESTINATION: key,
            }
            _measures().consumed.add(number, _metric_attributes(attributes, None))


@contextmanager
def publishing(tasks: tuple[Task, ...]) -> Iterator[tuple[Task, ...]]:
    """Record the span and metrics of a publish; see `taskqueue_core.telemetry.publishing`."""
    if all(_PARENT in task.headers for task in tasks):
        yield tasks
        return
    attributes = _attributes("send", tasks)
    destination = attributes.get(_DESTINATION)
    span: trace.Span = trace.INVALID_SPAN
    context: dict[str, str] = {}
    with _harmless():
        span = trace.get_tracer(_NAME).start_span(
            "send" if destination is None else f"send {destination}",
            kind=SpanKind.PRODUCER,
            attributes=attributes,
        )
        _propagator.inject(context, trace.set_span_in_context(span))
    start, error = time.perf_counter(), None
    try:
        yield tuple(_carrying(task, context) for task in tasks) if context else tasks
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        seconds = time.perf_counter() - start
        with _harmless():
            _end(span, error)
        with _harmless():
            labels = _metric_attributes(attributes, error)
            measures = _measures()
            measures.operations.record(seconds, labels)
            measures.sent.add(len(tasks), labels)


def _carrying(task: Task, context: dict[str, str]) -> Task:
    headers = task.headers
    if _PARENT in headers:
        return task
    merged = {**headers, **context}
    if len(merged) > LIMITS.headers or _size(merged) > LIMITS.header_bytes:
        return task
    carrying: Task = task.__copy__()  # type: ignore[attr-defined] # msgspec has it, untyped
    # The fields were validated when the task was made.
    msgspec.structs.force_setattr(carrying, "headers", merged)
    return carrying


def _size(headers: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())


class Processing:
    """A context manager that makes a span current, and records the duration of its block."""

    __slots__ = ("_attributes", "_span", "_start", "_token")

    def __init__(self, tasks: Sequence[Carrier]) -> None:
        self._attributes = attributes = _attributes("process", tasks)
        headers = tasks[0].headers if len(tasks) == 1 else {}
        destination = attributes.get(_DESTINATION)
        self._span: trace.Span = trace.INVALID_SPAN
        with _harmless():
            self._span = trace.get_tracer(_NAME).start_span(
                "process" if destination is None else f"process {destination}",
                context=_propagator.extract(headers) if _PARENT in headers else None,
                kind=SpanKind.CONSUMER,
                attributes=attributes,
                links=_links(tasks),
            )

    def __enter__(self) -> None:
        """Make the span current."""
        self._token = attach(trace.set_span_in_context(self._span))
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the span and record its duration."""
        seconds = time.perf_counter() - self._start
        error = None if kind is None else kind.__name__
        detach(self._token)
        with _harmless():
            _end(self._span, error)
        with _harmless():
            _measures().process.record(seconds, _metric_attributes(self._attributes, error))
