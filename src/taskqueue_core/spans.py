"""Spans and metrics that follow OpenTelemetry's conventions for messaging. Only `telemetry` imports this module."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""maximum number of queue names in metrics; measurements of further queues have no queue name"""
_destinations: set[str] = set()
_LINKS = 128
"""maximum number of links of one span; most telemetry backends ignore further links"""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TYPES = {"send": "send", "receive": "receive", "process": "process"}


@contextmanager
def _harmless() -> Iterator[None]:
    # An error in a provider, a processor or a sampler must not affect the observed call.
    try:
        yield
    except Exception:  # noqa: BLE001 - a provider may raise any error, which is logged
        _log.exception("telemetry failed")


class Carrier(Protocol):
    """A task as telemetry reads it. It may be a `Task`, or a task in a socket frame."""

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


def listening() -> bool:
    """Return whether the program has set a provider."""
    # The API's own placeholders for missing providers record nothing.
    return not all(
        type(provider).__module__.startswith(_SDKLESS)
        for provider in (trace.get_tracer_provider(), metrics.get_meter_provider())
    )


class _Instruments:
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


_instruments = lru_cache(maxsize=4)(_Instruments)


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
    """A context manager that records a span and metrics of a backend call. ``tasks`` may be set until the call ends."""

    __slots__ = ("_began", "_name", "_start", "tasks")

    def __init__(self, name: str, tasks: Sequence[Carrier] = ()) -> None:
        """Start measuring the duration. ``name`` is ``receive``, ``retry`` or the verb of a settlement."""
        self._name = name
        self.tasks = tasks
        self._began = time.time_ns()
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Record the span and metrics, unless the call involved no task."""
        if not self.tasks:
            return
        seconds = time.perf_counter() - self._start
        with _harmless():
            self._record(seconds, None if kind is None else kind.__name__)

    def _record(self, seconds: float, error: str | None) -> None:
        attributes = _attributes(self._name, self.tasks)
        span = _start(
            attributes, kind=SpanKind.CLIENT, links=_links(self.tasks), start_time=self._began
        )
        _end(span, error)
        measures = _measures()
        labels = _metric_attributes(attributes, error)
        measures.operations.record(seconds, labels)
        if self._name == "receive":
            measures.consumed.add(len(self.tasks), labels)


def _start(attributes: dict[str, Any], **options: Any) -> trace.Span:
    names = [attributes["messaging.operation.name"], attributes.get(_DESTINATION)]
    return trace.get_tracer(_NAME).start_span(
        " ".join(name for name in names if name is not None), attributes=attributes, **options
    )


def _end(span: trace.Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


@contextmanager
def _observed(
    kind: SpanKind,
    attributes: dict[str, Any],
    record: Callable[[float, dict[str, Any]], None],
    *,
    linked: Sequence[Carrier] = (),
) -> Iterator[trace.Span]:
    """Yield a span. After the ``with`` block, call ``record`` with its duration in seconds and metric attributes."""
    span: trace.Span = trace.INVALID_SPAN
    with _harmless():
        headers = linked[0].headers if len(linked) == 1 else {}
        context = _propagator.extract(headers) if _PARENT in headers else None
        span = _start(attributes, kind=kind, context=context, links=_links(linked))
    start, error = time.perf_counter(), None
    try:
        yield span
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        seconds = time.perf_counter() - start
        with _harmless():
            _end(span, error)
        with _harmless():
            record(seconds, _metric_attributes(attributes, error))


def consumed(tasks: Sequence[Carrier]) -> None:
    """Count tasks that a server has sent to this program."""
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

    def record(seconds: float, labels: dict[str, Any]) -> None:
        _measures().operations.record(seconds, labels)
        _measures().sent.add(len(tasks), labels)

    with _observed(SpanKind.PRODUCER, _attributes("send", tasks), record) as span:
        context: dict[str, str] = {}
        with _harmless():
            _propagator.inject(context, trace.set_span_in_context(span))
        yield tuple(_carrying(task, context) for task in tasks) if context else tasks


def _carrying(task: Task, context: dict[str, str]) -> Task:
    headers = task.headers
    if _PARENT in headers:
        return task
    merged = {**headers, **context}
    if len(merged) > LIMITS.headers or _size(merged) > LIMITS.header_bytes:
        return task
    carrying: Task = task.__copy__()  # type: ignore[attr-defined] # defined by msgspec, without a type
    # The copy need not be validated: the size of the headers was checked above, and the other fields are unchanged.
    msgspec.structs.force_setattr(carrying, "headers", merged)
    return carrying


def _size(headers: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())


@contextmanager
def processing(tasks: Sequence[Carrier]) -> Iterator[None]:
    """Record the span and duration of a handler; see `taskqueue_core.telemetry.processing`."""

    def record(seconds: float, labels: dict[str, Any]) -> None:
        _measures().process.record(seconds, labels)

    attributes = _attributes("process", tasks)
    with _observed(SpanKind.CONSUMER, attributes, record, linked=tasks) as span:
        token = attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            detach(token)
