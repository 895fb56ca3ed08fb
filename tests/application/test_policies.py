"""Policies that tasks declare, and their way into the settings of queues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from taskqueue_core import (
    QueueLimits,
    RateLimit,
    Retry,
    RetryPolicy,
    Snooze,
    Stream,
    Tasks,
    connect,
)
from taskqueue_core.capabilities import Order, Owner, QueueSettings, control_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import (
    CapabilityMissing,
    ConfigurationError,
    InvalidInput,
    SettingsConflict,
)
from taskqueue_core.queue_settings import by_operator, change_settings, give_back
from taskqueue_core.recordstore import RecordBackend
from taskqueue_memory import MemoryBackend
from taskqueue_remote.backend import RemoteBackend
from taskqueue_worker import LocalWorker
from tests.core.dict_store import DictStore, Disk

ANY_POLICY: Any = RetryPolicy
ANY_LIMITS: Any = QueueLimits
DECLARED = RetryPolicy(max_attempts=10, base=2, cap=600)


def work() -> None:
    """A task."""


def shop(**options: Any) -> Tasks:
    """Return a registry with the task ``work``, declared with these options."""
    tasks = Tasks()
    tasks.task("work", **options)(work)
    return tasks


@pytest.mark.parametrize(
    ("declare", "fault"),
    [
        (lambda: shop(retry=0), "RetryPolicy: max_attempts must be greater than or equal to 1"),
        (lambda: shop(retry="5"), "retry: got a str; expected a RetryPolicy, or a number of attempts"),
        (lambda: shop(retry=True), "retry: got a bool"),
        (lambda: RetryPolicy(base=-1), "RetryPolicy: base must be greater than or equal to 0"),
        (lambda: ANY_POLICY(attempts=3), "RetryPolicy: there is no field 'attempts'; the fields are max_attempts, "),
        (lambda: ANY_LIMITS(ratio="1/s"), "QueueLimits: there is no field 'ratio'; the fields are rate, "),
        (lambda: shop(timeout=-1), "timeout must be greater than or equal to 0.001"),
        (lambda: shop(timeout="soon"), "timeout must be a valid number"),
        (lambda: shop(result_ttl=-1), "result_ttl must be greater than or equal to 0"),
        (lambda: shop(keep_ended=-1), "keep_ended must be greater than or equal to 0"),
        (lambda: shop(keep_ended_most=0), "keep_ended_most must be greater than or equal to 1"),
        (lambda: shop(index=("user:42",)), "index: the part of a tag before its first colon"),
        (lambda: shop(index="user"), "index must be a valid tuple"),
        (lambda: shop(limits={"rate": "1/s"}), "limits: got a dict; expected a QueueLimits"),
        (lambda: shop(stream=5), "stream: got a int; expected a Stream"),
        (lambda: Stream(events=0), "Stream: stream_events must be greater than or equal to 1"),
        (lambda: Stream(ttl=0), "Stream: stream_ttl must be greater than or equal to 1"),
        (lambda: QueueLimits(capacity=0), "QueueLimits: capacity must be greater than or equal to 1"),
        (lambda: QueueLimits(rate="fast"), "QueueLimits: rate must be a rate, for example 100/1m"),
        (lambda: QueueLimits(rate="0/1m"), "max_tokens must be greater than or equal to 1"),
        (lambda: QueueLimits(order="lifo"), "QueueLimits: order: "),
        (lambda: QueueLimits(tenant_capacity=1), "QueueLimits: tenant_capacity needs order 'fair'"),
    ],
)  # fmt: skip
def test_a_wrong_policy_is_named_at_import(declare: Callable[[], object], fault: str) -> None:
    """U3: a policy out of range is a `ConfigurationError` where it is written, and names the field."""
    with pytest.raises(ConfigurationError, match=fault.replace("(", "\\(")):
        declare()


NO_NUMBERS: list[Any] = [
    "5",
    b"5",
    True,
    float("nan"),
    float("inf"),
    -float("inf"),
    -1,
    10**400,
    [5],
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_what_is_no_number_is_refused(value: Any) -> None:
    """U3: a numeric option takes neither text, nor a truth value, nor a number out of range; the error names it."""
    kinds: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (shop, ("timeout", "result_ttl", "batch", "keep_ended", "keep_ended_most")),
        (RetryPolicy, ("base", "cap", "jitter", "max_attempts", "factor")),
        (QueueLimits, ("capacity", "max_inflight", "max_processing_time", "floor_share")),
        (QueueSettings, ("timeout", "result_ttl", "max_losses", "dedupe_window", "queue_ttl")),
    )
    declarations: list[tuple[str, Callable[[], object]]] = [
        (name, partial(kind, **{name: value})) for kind, names in kinds for name in names
    ]
    declarations += [
        ("delays", lambda: RetryPolicy(delays=(value,))),
        ("weights", lambda: QueueLimits(order="fair", weights={"acme": value})),
        ("tenant_capacity", lambda: QueueLimits(order="fair", tenant_capacity=value)),
        ("grace", lambda: LocalWorker(shop(), backend="memory", grace=value)),
        ("concurrency", lambda: LocalWorker(shop(), backend="memory", concurrency=value)),
        ("prefetch", lambda: LocalWorker(shop(), backend="memory", prefetch=value)),
    ]
    for name, declare in declarations:
        with pytest.raises((ConfigurationError, ValidationError), match=name):
            declare()
    for rule in (Retry, Snooze):
        with pytest.raises(InvalidInput, match="delay"):
            rule(value)


async def test_declared_policies_are_applied() -> None:
    """U3: `apply` writes the policies of all tasks, in one change for each queue; a second one changes nothing."""
    limits = QueueLimits(rate="100/1m", max_inflight=20, order="fair", tenant_max_inflight=5)
    tasks = shop(
        retry=RetryPolicy(max_attempts=8),
        timeout=30,
        limits=limits,
        result_ttl=60,
        index=("user",),
        keep_ended=3600,
        keep_ended_most=50,
        stream=Stream(events=5000, ttl=60),
    )
    tasks.task("plain")(work)
    async with tasks.connect("memory") as queue:
        planned = await tasks.apply(dry_run=True)
        control = control_of(queue.backend)
        assert await control.settings("work") == QueueSettings()
        assert await tasks.apply() == planned
        settings = await control.settings("work")
        assert (settings.version, settings.timeout, settings.result_ttl) == (1, 30, 60)
        assert (settings.index, settings.keep_ended, settings.keep_ended_most) == (
            ("user",),
            3600,
            50,
        )
        assert (settings.stream_events, settings.stream_ttl) == (5000, 60)
        assert settings.retry == RetryPolicy(max_attempts=8, base=2, cap=600)
        assert settings.rate_limit == RateLimit.parse("100/1m")
        assert (settings.order, settings.tenant_max_inflight) == (Order.FAIR, 5)
        assert settings.owners == dict.fromkeys(
            ("retry", "timeout", "result_ttl", "rate_limit", "max_inflight", "order", "tenant_max_inflight",
             "index", "keep_ended", "keep_ended_most", "stream_events", "stream_ttl"),
            Owner.DECLARED,
        )  # fmt: skip
        assert (await control.settings("plain")).retry == DECLARED
        again = await tasks.apply()
        assert (again.changed, (await control.settings("work")).version) == ((), 1)


async def test_what_an_operator_set_survives() -> None:
    """U4: an apply changes declared fields alone, until the operator gives a field back; ``prune`` resets others."""
    async with connect("memory") as queue:
        control = control_of(queue.backend)

        async def apply(tasks: Tasks, *, prune: bool = False) -> dict[str, list[str]]:
            async with tasks.connect(queue):
                done = await tasks.apply(prune=prune)
            groups = {"changed": done.changed, "kept": done.kept, "undeclared": done.undeclared}
            return {name: [each.field for each in group] for name, group in groups.items() if group}

        async def operator(**changes: Any) -> None:
            await change_settings(
                control, "work", lambda found: by_operator(found, found.model_copy(update=changes))
            )

        limits = QueueLimits(capacity=5, max_inflight=3)
        assert await apply(shop(timeout=30, limits=limits)) == {
            "changed": ["retry", "timeout", "capacity", "max_inflight"]
        }
        await operator(timeout=90.0, max_inflight=None)
        assert await apply(shop(timeout=20, limits=limits)) == {"kept": ["timeout", "max_inflight"]}
        assert (await control.settings("work")).timeout == 90
        await change_settings(control, "work", lambda found: give_back(found, ["timeout"]))
        assert await apply(shop(timeout=20)) == {"changed": ["timeout"], "undeclared": ["capacity"]}
        assert await apply(shop(timeout=20), prune=True) == {"changed": ["capacity"]}
        settings = await control.settings("work")
        assert (settings.timeout, settings.capacity, settings.max_inflight) == (20, None, None)
        assert settings.owners == {
            "retry": "declared", "timeout": "declared", "max_inflight": "operator"
        }  # fmt: skip
        # Nothing says who has set a value that a program wrote with `configure`: it is treated as an operator's.
        await control.configure("other", QueueSettings(capacity=9))
        other = Tasks()
        other.task("other", limits=QueueLimits(capacity=5))(work)
        assert await apply(other) == {"changed": ["retry"], "kept": ["capacity"]}


async def test_a_declaration_that_contradicts_an_operator() -> None:
    """U4: limits of tenants do not fit the order that an operator has set: the error names the field and the queue."""
    tasks = shop(limits=QueueLimits(order="fair", tenant_capacity=5))
    async with tasks.connect("memory") as queue:
        control = control_of(queue.backend)
        await control.configure("work", QueueSettings(owners={"order": Owner.OPERATOR}))
        with pytest.raises(ConfigurationError, match=r"'work': tenant_capacity needs order 'fair'"):
            await tasks.apply()
        assert (await control.settings("work")).version == 1


async def test_a_backend_that_cannot_keep_a_setting() -> None:
    """U3: `apply` raises `CapabilityMissing`, which names the field, before it writes anything."""
    backend = RecordBackend("dict", DictStore(Disk()), ManualClock(), durable=True)
    tasks = shop(timeout=5)
    tasks.task("fair", limits=QueueLimits(order="fair"))(work)
    async with connect(backend) as queue, tasks.connect(queue):
        with pytest.raises(CapabilityMissing, match=r"^order: .* of the queue 'fair'"):
            await tasks.apply()
        assert await control_of(backend).settings("work") == QueueSettings()
        async with (timed := shop(timeout=5)).connect(queue):
            await timed.apply()
        assert (await control_of(backend).settings("work")).timeout == 5


async def test_concurrent_changes_end_the_apply() -> None:
    """U4: `apply` reads again three times after a concurrent change, and then raises `SettingsConflict`."""
    backend = MemoryBackend()
    control, reads = backend.control, 0
    settings_of = control.settings

    async def changed_after_the_read(key: str) -> QueueSettings:
        nonlocal reads
        reads += 1
        found = await settings_of(key)
        await control.configure(key, found.model_copy(update={"max_losses": reads}))
        return found

    control.settings = changed_after_the_read  # type: ignore[method-assign]
    async with connect(backend) as queue, (tasks := shop(timeout=5)).connect(queue):
        with pytest.raises(SettingsConflict):
            await tasks.apply()
    assert reads == 4


def test_shared_queues_declare_the_same() -> None:
    """U3: tasks that share a queue may declare its settings together, but not different values of one."""
    tasks = Tasks()
    tasks.task("a", queue="shared", timeout=5)(work)
    tasks.task("b", queue="shared", limits=QueueLimits(capacity=3))(work)
    tasks.task("c", queue="shared", timeout=5)(work)
    fault = (
        "the tasks 'a' and 'd' share the queue 'shared', but declare different values of timeout"
    )
    with pytest.raises(ConfigurationError, match=fault):
        tasks.task("d", queue="shared", timeout=6)(work)
    assert "d" not in tasks.functions
    others = Tasks()
    others.task("e", queue="shared", retry=3)(work)
    others.include(tasks)
    rival = Tasks()
    rival.task("f", queue="shared", retry=4)(work)
    with pytest.raises(ConfigurationError, match="values of retry"):
        others.include(rival)


@pytest.mark.parametrize("kind", [RemoteBackend, MemoryBackend])
def test_backends_claim_what_a_declaration_needs(kind: type[Any]) -> None:
    """U3: the backend of a server and the memory backend have the capabilities of all limits."""
    assert {"flow", "fair_order", "floor_share"} <= kind.capabilities.names
