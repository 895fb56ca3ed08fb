"""OpenTelemetry traces and metrics, from a publisher through a real server to a handler."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from taskqueue_core import spans, telemetry
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Delivery, Settled, Task
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from taskqueue_worker import LocalWorker, Worker
from tests.core.fakes import ScriptedBackend
from tests.server.support import Running, eventually, running

SECRET = "c4nary"


class Collected:
    """The spans and metrics that a test has exported."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the finished spans with this name."""
        return [span for span in self.spans.get_finished_spans() if span.name == name]

    async def one(self, name: str) -> ReadableSpan:
        """Wait for the only span with this name and return it."""
        await eventually(lambda: self.named(name))
        (span,) = self.named(name)
        return span

    def points(self, name: str) -> dict[str, float]:
        """Return the values of a metric, by operation name followed by the error type if there is one."""
        found: dict[str, float] = {}
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        assert point.attributes is not None
                        assert point.attributes["messaging.system"] == "taskqueue"
                        words = [point.attributes["messaging.operation.name"]]
                        words.append(point.attributes.get("error.type", ""))
                        value: Any = getattr(point, "count", None) or getattr(point, "value", 0)
                        name_of = " ".join(map(str, words)).strip()
                        found[name_of] = found.get(name_of, 0) + value
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Install trace and meter providers for one test, because a process can set them only once."""
    collected = Collected()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(collected.spans))
    measuring = MeterProvider([collected.reader])
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracing)
    monkeypatch.setattr(metrics_internal, "_METER_PROVIDER", measuring)
    monkeypatch.setattr(telemetry, "_provider", telemetry._Provider())
    monkeypatch.setattr(spans, "_destinations", set())
    assert trace.get_tracer_provider() is tracing
    assert metrics.get_meter_provider() is measuring
    yield collected
    tracing.shutdown()
    measuring.shutdown()


@asynccontextmanager
async def working(it: Running, worker: Worker) -> AsyncIterator[None]:
    """Run a worker that is connected to a server."""
    worker.configure(url=it.server.url)
    serving = asyncio.create_task(worker.serve())
    try:
        yield
    finally:
        worker.stop()
        await serving


def linked(span: ReadableSpan) -> set[int]:
    """Return the ids of the spans to which a span is linked."""
    return {link.context.span_id for link in span.links}


def id_of(span: ReadableSpan) -> int:
    """Return the id of a span."""
    assert span.context is not None
    found: int = span.context.span_id
    return found


class TestThroughAServer:
    """A publisher, a server and a worker, which may be separate programs."""

    async def test_one_trace_from_the_publisher_to_the_handler(self, seen: Collected) -> None:
        """E7: the span of the handler is a child of the publisher's span and linked to it.

        Spans that the handler creates are children of the handler's span.
        """
        worker = Worker(concurrency=2)
        tracer = trace.get_tracer("user")

        @worker.task("k")
        async def handle(n: int) -> int:
            with tracer.start_as_current_span("inner"):
                return n

        @worker.task("sync")
        def handle_sync() -> None:
            with tracer.start_as_current_span("inner sync"):
                pass

        async with running() as it, working(it, worker):
            remote = InstrumentedBackend(RemoteBackend(it.server.url), Hooks())
            try:
                with tracer.start_as_current_span("caller") as caller:
                    await Queue(remote).publish("k", {"n": 1}, id="t1")
                    await seen.one("ack k")
                    await Queue(remote).publish("sync", id="t2")
            finally:
                await remote.aclose()
            for key, inside in (("k", "inner"), ("sync", "inner sync")):
                sent = await seen.one(f"send {key}")
                process = await seen.one(f"process {key}")
                inner = await seen.one(inside)
                assert sent.kind is SpanKind.PRODUCER
                assert sent.parent is not None
                assert sent.parent.span_id == caller.get_span_context().span_id
                assert process.kind is SpanKind.CONSUMER
                assert process.parent is not None
                assert process.parent.span_id == id_of(sent)
                assert linked(process) == {id_of(sent)}
                assert inner.parent is not None
                assert inner.parent.span_id == id_of(process)
                assert sent.context is not None
                assert inner.context is not None
                assert inner.context.trace_id == sent.context.trace_id
            for name, kind in (("receive k", "receive"), ("ack k", "settle")):
                span = await seen.one(name)
                assert span.attributes is not None
                assert span.attributes["messaging.operation.type"] == kind
                assert linked(span) == {id_of(await seen.one("send k"))}
            sent = await seen.one("send k")
            assert sent.attributes == {
                "messaging.system": "taskqueue",
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.destination.name": "k",
                "messaging.message.id": "t1",
            }
        assert seen.points("messaging.client.sent.messages") == {"send": 2}
        assert seen.points("messaging.client.consumed.messages") == {"receive": 2, "process": 2}
        assert seen.points("messaging.process.duration") == {"process": 2}
        assert {"send", "receive", "ack"} <= set(seen.points("messaging.client.operation.duration"))

    async def test_errors_have_a_kind_and_no_text(self, seen: Collected) -> None:
        """Security 15, fault K1: the span of a failed handler has the error type, but no payload and no message."""
        worker = Worker()

        @worker.task("k")
        async def handle(word: str) -> None:
            raise ValueError(word)

        async with running() as it, working(it, worker):
            await Queue(it.context.backend).publish("k", {"word": SECRET}, headers={"x": SECRET})
            process = await seen.one("process k")
            assert process.status.status_code is StatusCode.ERROR
            assert process.attributes is not None
            assert process.attributes["error.type"] == "ValueError"
            assert not process.events
            await seen.one("retry k")
        assert seen.points("messaging.process.duration") == {"process ValueError": 1}
        assert not any(SECRET in span.to_json() for span in seen.spans.get_finished_spans())


class TestInOneProcess:
    """Publishers and consumers in one process, without a server."""

    async def test_batches(self, seen: Collected) -> None:
        """A batch call has one span, linked to the span of each publish.

        If the batch contains several queues, the span has no destination name.
        """
        worker = LocalWorker(backend=InstrumentedBackend(MemoryBackend(), Hooks()))
        backend: Any = worker._backend
        queue = Queue(backend)
        await queue.publish_many([Task(key="a", id="1"), Task(key="a", id="2")])
        await queue.publish_many([Task(key="a", id="3"), Task(key="b", id="4")])
        subscription = backend.subscribe(["a"], "w")
        received = await subscription.receive(10, 0)
        await subscription.ack(*received.deliveries)
        await subscription.close()
        (two,), (mixed,) = seen.named("send a"), seen.named("send")
        assert two.attributes is not None
        assert two.attributes["messaging.batch.message_count"] == 2
        assert "messaging.message.id" not in two.attributes
        assert mixed.attributes is not None
        assert "messaging.destination.name" not in mixed.attributes
        for name in ("receive a", "ack a"):
            (span,) = seen.named(name)
            assert span.attributes is not None
            assert span.attributes["messaging.batch.message_count"] == 3
            assert linked(span) == {id_of(two), id_of(mixed)}

    async def test_a_batch_handler(self, seen: Collected) -> None:
        """A batch handler has one span, which is linked to the spans of all publishers."""
        tasks = [Task(key="k", id=str(n)) for n in range(2)]
        with telemetry.publishing(tuple(tasks)) as carrying:
            pass
        with telemetry.processing(carrying):
            current = trace.get_current_span().get_span_context()
        (process,) = seen.named("process k")
        assert id_of(process) == current.span_id
        assert process.parent is None
        assert len(process.links) == 2
        assert not trace.get_current_span().get_span_context().is_valid

    async def test_who_carries_a_context_keeps_it(self, seen: Collected) -> None:
        """A task that already carries a trace context keeps it and gets no new span.

        If the headers have no space left, no context is added.
        """
        backend = InstrumentedBackend(MemoryBackend(), Hooks())
        known = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=b"}
        full = {f"h{n}": "" for n in range(LIMITS.headers)}
        large = {"h": "x" * (LIMITS.header_bytes - 1)}
        all_ = [Task(key="k", id=str(n), headers=h) for n, h in enumerate((known, full, large, {}))]
        await backend.publisher.publish(all_[0])
        assert not seen.named("send k")
        await backend.publisher.publish(*all_)
        assert len(seen.named("send k")) == 1
        got = await backend.subscribe(["k"], "w").receive(10, 0)
        headers = [delivery.task.headers for delivery in got.deliveries]
        assert headers[:3] == [known, full, large]
        assert set(headers[3]) == {"traceparent"}
        assert all_[3].headers == {}, "the task of the caller is unchanged"

    async def test_headers_that_are_no_context(self, seen: Collected) -> None:
        """Fault K1: a task with an invalid trace context is processed without a link."""
        for text in ("", "x", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ÿ" * 50):
            with telemetry.processing([Task(key="k", headers={"traceparent": text})]):
                pass
        assert [span.links for span in seen.named("process k")] == [()] * 5

    async def test_many_queues(self, seen: Collected) -> None:
        """Security 16: metrics contain a limited number of queue names; all other queues are counted without a name."""
        for n in range(1000):
            with telemetry.operation("ack", [Task(key=f"q{n}")]):
                pass
        assert seen.points("messaging.client.operation.duration") == {"ack": 1000}
        data = seen.reader.get_metrics_data()
        assert data is not None
        (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
        assert len(metric.data.data_points) == spans.MOST_DESTINATIONS + 1

    async def test_failures(self, seen: Collected) -> None:
        """A failed call has a span with error status, and the error is raised to the caller."""
        inner = ScriptedBackend()
        inner.publish_errors.append(BackendUnavailable("away"))
        backend = InstrumentedBackend(inner, Hooks())
        with pytest.raises(BackendUnavailable):
            await backend.publisher.publish(Task(key="k"))
        (sent,) = seen.named("send k")
        assert sent.status.status_code is StatusCode.ERROR
        assert seen.points("messaging.client.operation.duration") == {"send BackendUnavailable": 1}

    @pytest.mark.parametrize("when", ["on_start", "on_end"])
    async def test_a_provider_that_fails(
        self, when: str, seen: Collected, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Fault K1, law 2: an exception in a telemetry plugin is logged and does not affect the result of a call."""

        class Broken(SpanProcessor):
            """A span processor that raises an exception."""

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        setattr(Broken, when, fail)
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        provider.add_span_processor(Broken())
        backend = InstrumentedBackend(MemoryBackend(), Hooks())
        (confirmation,) = await backend.publisher.publish(Task(key="k", id="a"))
        assert confirmation.stored
        subscription = backend.subscribe(["k"], "w")
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        ran = []
        with telemetry.processing([delivery.task]):
            ran.append(delivery.task.id)
        assert ran == ["a"]
        assert await subscription.ack(delivery) == (Settled.OK,)
        assert caplog.text.count("ZeroDivisionError") >= 4
        assert seen.points("messaging.client.sent.messages") == {"send": 1}

    async def test_an_empty_receive_is_nothing(self, seen: Collected) -> None:
        """A receive that returns nothing, and a publish of no tasks, create no span."""
        backend = InstrumentedBackend(MemoryBackend(), Hooks())
        await backend.subscribe(["k"], "w").receive(1, 0)
        await backend.publisher.publish()
        assert not seen.spans.get_finished_spans()
        delivery = Delivery(task=Task(key="k"), receipt="r", attempt=1, delivered_at=0)
        telemetry.consumed([delivery.task])
        assert seen.points("messaging.client.consumed.messages") == {"process": 1}


class TestWithoutIt:
    """Without OpenTelemetry there is no overhead."""

    def test_nothing_is_imported(self) -> None:
        """Publishing and consuming do not import OpenTelemetry, and work if it is not installed."""
        program = """
import sys
{block}
import asyncio
import taskqueue_core
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.tasks import Task
from taskqueue_worker import Worker
from taskqueue_memory import MemoryBackend
from taskqueue_core import telemetry

async def main():
    backend = InstrumentedBackend(MemoryBackend(), Hooks())
    await backend.publisher.publish(Task(key="k"))
    subscription = backend.subscribe(["k"], "w")
    received = await subscription.receive(1, 0)
    await subscription.ack(*received.deliveries)
    assert received.deliveries[0].task.headers == {{}}

asyncio.run(main())
assert not telemetry.active()
print(any(name.startswith("opentelemetry.") for name in sys.modules))
"""
        for block in ("", "sys.modules['opentelemetry'] = None"):
            command = [sys.executable, "-c", program.format(block=block)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            assert done.stdout == "False\n"

    def test_without_a_provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a configured provider, telemetry is inactive.

        The check for a provider is not repeated on every call.
        """
        provider = telemetry._Provider()
        monkeypatch.setattr(telemetry, "_provider", provider)
        assert not telemetry.active()
        monkeypatch.setattr(
            provider, "refresh", lambda _: pytest.fail("the provider was checked again at once")
        )
        assert not telemetry.active()
        with telemetry.operation("receive") as observed, telemetry.processing([]):
            assert observed is None
