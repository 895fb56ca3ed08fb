"""The Prometheus metrics: their values, their bounds, and which token may see which of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.config import Settings
from taskqueue_core.errors import LeaseLost
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Published,
    Settled,
    Task,
)
from taskqueue_memory import MemoryBackend
from taskqueue_server.context.server import VERSION, ServerContext
from taskqueue_server.metrics import exporter, store_metrics
from taskqueue_server.metrics.http import ServerMiddleware
from taskqueue_server.metrics.process_metrics import MAX_KEYS, OTHER, ProcessMetrics
from tests.server.access import ADMIN, A, bearer, everybody
from tests.server.support import eventually, http, problem, receipts, running


class Seen:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in prometheus(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of one sample."""
        return self.samples["taskqueue_" + name, *sorted(labels.items())]

    def has(self, name: str) -> bool:
        """Return whether there is any sample with this name."""
        return any(sample[0] == "taskqueue_" + name for sample in self.samples)

    def keys(self) -> set[str]:
        """Return all values of the label ``key``."""
        return {value for sample in self.samples for name, value in sample[1:] if name == "key"}


async def scrape(client: httpx2.AsyncClient, **options: Any) -> Seen:
    """Read the metrics."""
    answer = await client.get("/metrics", **options)
    assert answer.status_code == 200, answer.text
    return Seen(answer.text)


class TestFigures:
    """The values of the metrics."""

    async def test_of_the_store_and_of_the_process(self) -> None:
        """Law 1, E5: metrics of a queue equal its ledger, settings and latencies.

        Metrics of the process count its requests, sockets and credit.
        """
        async with running() as it, http(it) as client:
            control = it.context.control
            wanted = QueueSettings(
                max_inflight=9, capacity=4, rate_limit=RateLimit(max_tokens=50, interval=5)
            )
            await control.configure("k", wanted)
            await it.publish("a", "b", "c")
            await it.publish("later", not_before=it.backend.now() + 60)
            refused = await client.post("/v1/tasks", json={"key": "k"})
            assert refused.status_code == 429
            async with it.worker(credit=5) as worker:
                one, two, _ = receipts(await worker.deliveries(3))
                await worker.send("ack", receipts=[one])
                await worker.send("dead_letter", receipt=two, reason="bad")
                await worker.settled(2)
                seen = await scrape(client)
                assert seen("store_up") == 1
                assert seen("queues") == 1
                assert seen("published_total", key="k") == 4
                assert seen("delivered_total", key="k") == 3
                ledger = await it.ledger()
                for state in ("scheduled", "waiting", "in_flight", "done", "dead"):
                    assert seen("queue_tasks", key="k", state=state) == getattr(ledger, state)
                assert seen("queue_imbalance_tasks", key="k") == 0
                assert seen("queue_oldest_age_seconds", key="k") == 0
                assert seen("queue_subscribers", key="k") == 1
                assert seen("queue_unclaimed", key="k") == 0
                assert seen("queue_max_inflight_tasks", key="k") == 9
                assert seen("queue_capacity_tasks", key="k") == 4
                assert seen("queue_rate_limit_tasks_per_second", key="k") == 10
                assert seen("queue_paused", key="k", what="deliveries") == 0
                assert seen("task_wait_seconds_count", key="k") == 3
                assert seen("task_run_seconds_count", key="k") == 2
                assert seen("task_end_to_end_seconds_count", key="k") == 1
                assert 0 < seen("task_end_to_end_seconds_sum", key="k") < 5
                assert seen("publish_refused_total", code="queue_full") == 1
                assert seen("settled_total", outcome="done") == 1
                assert seen("settled_total", outcome="dead") == 1
                assert seen("connections", state="welcome") == 1
                assert seen("credit_tasks") == 2
                assert seen("held_tasks") == 1
                assert seen("long_polls") == 0
                post = {"method": "POST", "path": "/v1/tasks"}
                assert seen("http_requests_total", **post, status="4xx") == 1
                assert seen("http_request_seconds_count", **post) == 1
                assert seen("build_info", version=VERSION) == 1

    async def test_queues_without_a_consumer(self) -> None:
        """Fault K1: metrics report a queue with waiting tasks and no subscription, and the age of its oldest task."""
        async with running() as it, http(it) as client:
            await it.publish("a")
            await it.context.control.configure("k", QueueSettings(paused=True))
            await asyncio.sleep(0.01)
            seen = await scrape(client)
            assert seen("queue_unclaimed", key="k") == 1
            assert seen("queue_oldest_age_seconds", key="k") >= 0.01
            assert seen("queue_paused", key="k", what="deliveries") == 1
            assert seen("queue_paused", key="k", what="intake") == 0
            assert not seen.has("queue_max_inflight_tasks")

    async def test_the_same_on_every_replica(self) -> None:
        """Law 1: all servers on one store report the same queue metrics, whichever server did the work."""
        backend = MemoryBackend()
        names = ("published_total", "queue_tasks", "delivered_total")
        async with running(backend) as here, running(backend) as there:
            await here.publish("a", "b")
            async with there.worker(credit=1) as worker, http(here) as one, http(there) as two:
                await worker.send("ack", receipts=receipts(await worker.deliveries(1)))
                await worker.settled(1)
                told = [await scrape(one), await scrape(two)]
                first, second = (
                    {s: v for s, v in seen.samples.items() if s[0][10:] in names} for seen in told
                )
                assert first == second
                assert told[1]("settled_total", outcome="done") == 1
                assert not told[0].has("settled_total")

    async def test_both_formats(self) -> None:
        """The Accept header chooses one of two exposition formats, and each is valid for its own parser."""
        async with running() as it, http(it) as client:
            await it.publish("a")
            plain = await client.get("/metrics")
            assert plain.headers["content-type"].startswith("text/plain; version=")
            accept = "application/openmetrics-text; version=1.0.0; q=0.9, text/plain;q=0.5"
            open_ = await client.get("/metrics", headers={"accept": accept})
            assert open_.headers["content-type"].startswith(
                "application/openmetrics-text; version=1"
            )
            assert open_.text.endswith("# EOF\n")
            names = {family.name for family in openmetrics(open_.text)}  # type: ignore[no-untyped-call]
            assert {f.name for f in prometheus(plain.text)} - {"taskqueue_build_info"} <= names
            assert "_created" not in plain.text + open_.text
            for odd in ("application/openmetrics-text; version=abc", "x" * 9999, "\x7f,;=,*/*"):
                answer = await client.get("/metrics", headers={"accept": odd})
                assert answer.status_code == 200, odd
                assert len(answer.headers["content-type"]) < 200
            for family in openmetrics(open_.text):  # type: ignore[no-untyped-call]
                assert family.documentation, family.name


class TestWhoMaySee:
    """Which metrics a token may see."""

    async def test_a_token_sees_its_keys_only(self, tmp_path: Path) -> None:
        """C17, security 2: a token for one key sees only the metrics of this key, and none of the process."""
        path = everybody(tmp_path / "tokens.toml")
        async with running(tokens_file=path) as it, http(it) as client:
            await it.publish("1", key="a")
            await it.publish("2", "3", key="b")
            problem(await client.get("/metrics"), 401, "unauthenticated")
            every = await scrape(client, headers=bearer(ADMIN))
            assert every.keys() == {"a", "b"}
            some = await scrape(client, headers=bearer(A))
            assert some.keys() == {"a"}
            assert some("queues") == 1
            assert not some.has("http_requests_total")
            assert not some.has("connections")

    async def test_labels_hold_no_names_of_strangers(self) -> None:
        """Security 16, fault K1: no label contains a task id, tenant, worker, token, path or error from a client."""
        secret = "c4nary"
        async with running() as it, http(it) as client:
            await it.publish(secret, tenant=secret, headers={secret: secret})
            await client.get(f"/{secret}?token={secret}", headers={"authorization": secret})
            await client.request(secret.upper(), f"/v1/tasks/k/{secret}")
            await client.get(f"/v1/tasks/k/{secret}")
            async with it.worker(secret, credit=1) as worker:
                (got,) = await worker.deliveries(1)
                await worker.send("dead_letter", receipt=got["receipt"], reason=secret)
                await worker.settled(1)
                await worker.socket.close(4999, secret)
            await eventually(lambda: not len(it.context.registry))
            seen = await scrape(client)
            assert secret not in seen.text.lower()
            assert seen("http_requests_total", method=OTHER, path=OTHER, status="4xx") >= 1
            path = "/v1/tasks/{key}/{id}"
            assert seen("http_requests_total", method="GET", path=path, status="2xx") == 1
            assert seen("connections_ended_total", reason=OTHER) == 1


class TestBounds:
    """The number of samples is bounded."""

    @pytest.mark.parametrize("number", [1000, pytest.param(10_000, marks=pytest.mark.long)])
    async def test_many_queues(self, number: int) -> None:
        """Security 16: the busiest queues have their own samples, and all other queues share one sum."""
        async with running() as it, http(it) as client:
            tasks = [Task(key=f"q{n}", id="t") for n in range(number)]
            for start in range(0, len(tasks), 1000):
                await it.backend.publisher.publish(*tasks[start : start + 1000])
            await it.publish("x", "y", key="q999")
            seen = await scrape(client)
            assert len(seen.keys()) == store_metrics.MAX_LABELS + 1
            assert seen("published_total", key="q999") == 3
            told = {str(sample[0]) for sample in seen.samples if ("key", OTHER) in sample}
            assert "taskqueue_queue_subscribers" in told
            assert not [name for name in told if name.endswith("_total")], (
                "a sum of counters could decrease"
            )
            assert seen("queue_tasks", key=OTHER, state="waiting") == number + 2 - 3 - 199
            assert seen("queue_unclaimed", key=OTHER) == number - 200
            assert seen("queues") == number
            assert len(seen.text) < 1_000_000

    def test_latencies_of_many_queues(self) -> None:
        """Security 16: latencies are kept for a limited number of queues.

        Those of all others are summed without loss.
        """
        local = ProcessMetrics(registry := CollectorRegistry(), lambda: 2.0)
        for n in range(10_000):
            task = Task(key=f"q{n}", id="t")
            local.delivered(
                (Delivery(task=task, receipt="r", attempt=1, delivered_at=1, waiting_since=0.5),)
            )
        local.flush()
        local.flush()
        name, labels = "taskqueue_task_wait_seconds_count", {"key": OTHER}
        assert registry.get_sample_value(name, labels) == 10_000 - MAX_KEYS
        (waits,) = (f for f in registry.collect() if f.name == "taskqueue_task_wait_seconds")
        assert len({s.labels["key"] for s in waits.samples}) == MAX_KEYS + 1
        assert sum(s.value for s in waits.samples if s.name.endswith("_sum")) == 5000

    def test_no_queue_has_the_name_of_the_rest(self) -> None:
        """No queue can have the key that labels the sum of all other queues."""
        with pytest.raises(ValueError, match="key"):
            Task(key=OTHER)

    def test_what_clocks_and_outcomes_do(self) -> None:
        """A clock difference never adds negative time, and a lost lease is counted without a latency."""
        local = ProcessMetrics(registry := CollectorRegistry(), lambda: 1.0)
        task = Task(key="k", id="t")
        (ahead, unknown) = (
            Delivery(task=task, receipt="r", attempt=1, delivered_at=2, waiting_since=since)
            for since in (3.0, None)
        )
        local.delivered((ahead, unknown))
        outcomes = (Settled.OK, Settled.LEASE_LOST)
        local.settled((unknown, ahead), "ack", outcomes)
        local.settled((ahead, ahead), "lost", (Settled.OK, Settled.DEAD))
        local.settled((ahead,), "redeliver", (Settled.OK,))
        local.retry_scheduled(ahead)
        local.retry_scheduled(None)
        refused = [
            Confirmation(key="k", task_id="t", status=Published.CONFLICT),
            Confirmation(key="k", task_id="t", status=Published.REFUSED),
        ]
        local.published(refused)
        local.maintained(None)
        local.flush()

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"taskqueue_{name}", labels)

        assert value("task_wait_seconds_count", key="k") == 1
        assert value("task_wait_seconds_sum", key="k") == 0
        assert value("task_run_seconds_count", key="k") == 2
        assert value("task_end_to_end_seconds_count", key="k") is None
        for outcome in ("done", "stale", "lost", "returned", "retried"):
            assert value("settled_total", outcome=outcome) == 1, outcome
        assert value("publish_refused_total", code="conflict") == 1
        assert value("publish_refused_total", code=OTHER) == 1
        assert value("housekeeping_passes_total", result="failed") == 1

    def test_maintenance_that_does_not_keep_up(self) -> None:
        """Law 10: the metric says how late maintenance is, until a pass has left nothing."""
        local = ProcessMetrics(registry := CollectorRegistry(), lambda: 1.0)
        seen = []
        for done in (Maintained(behind=12.5), None, Maintained()):
            local.maintained(done)
            seen.append(registry.get_sample_value("taskqueue_housekeeping_behind_seconds"))
        assert seen == [12.5, 12.5, 0]

    async def test_each_settlement_that_comes_too_late(self) -> None:
        """Law 2: late settlements are counted as stale, whether sent one by one or in one call."""
        backend = MemoryBackend()
        local = ProcessMetrics(registry := CollectorRegistry(), backend.now)
        observed = InstrumentedBackend(backend, Hooks())
        observed.hooks.register(local)
        tasks = [Task(key="k", id=f"t{n}") for n in range(4)]
        await observed.publisher.publish(*tasks)
        subscription = observed.subscribe(["k"], "w")
        one, other, *more = (await subscription.receive(4, 0)).deliveries
        for task in tasks:
            await observed.control.cancel("k", task.id)
        for late in (subscription.ack(one), subscription.redeliver(other)):
            with pytest.raises(LeaseLost):
                await late
        await subscription.ack(*more)
        local.flush()
        labels = {"outcome": "stale"}
        assert registry.get_sample_value("taskqueue_settled_total", labels) == 4

    def test_files_that_others_removed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Fault K1: removing the files of an ended process does not fail if another process has removed them first."""

        def too_late(*_: object) -> None:
            raise FileNotFoundError

        monkeypatch.setattr(exporter, "mark_process_dead", too_late)
        monkeypatch.setattr(exporter, "process_exists", lambda _: False)
        (tmp_path / "gauge_livesum_1.db").touch()
        exporter._drop_ended_processes(tmp_path)

    async def test_what_fails_is_counted_as_a_failure(self) -> None:
        """Fault K1: an unexpected error is counted as status 5xx, and not as an aborted request."""
        local = ProcessMetrics(registry := CollectorRegistry(), lambda: 1.0)

        context = ServerContext(MemoryBackend(), Settings())
        scope = {"type": "http", "scheme": "http", "headers": [(b"host", b"localhost")]}

        async def fail(*_: object) -> None:
            raise RuntimeError

        async def unused(*_: object) -> Any:
            raise AssertionError

        with pytest.raises(RuntimeError):
            await ServerMiddleware(fail, context, local)(scope, unused, unused)
        labels = {"method": OTHER, "path": OTHER, "status": "5xx"}
        assert registry.get_sample_value("taskqueue_http_requests_total", labels) == 1
