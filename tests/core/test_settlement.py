"""Carrying out a verb, on backends that can retry in one step and on those that cannot."""

from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.settle import settle
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, LeaseLost
from taskqueue_core.retry import Ack, Bury, Redeliver, ScheduleRetry, Verb
from taskqueue_core.tasks import Delivery, Settled, State, Task
from taskqueue_memory import MemoryBackend
from tests.core.fakes import ScriptedBackend

DELIVERY = Delivery(task=Task(key="k", id="t"), receipt="r", attempt=3, delivered_at=0.0)


@pytest.mark.parametrize(
    ("verb", "state", "attempt"),
    [
        (Ack(b"1"), State.DONE, 1),
        (Redeliver(lost=False), State.WAITING, 1),
        (Redeliver(lost=True), State.WAITING, 1),
        (Bury("bad", None), State.DEAD, 1),
        (ScheduleRetry(5, "boom"), State.SCHEDULED, 2),
    ],
)
async def test_each_verb_has_its_transition(verb: Verb, state: State, attempt: int) -> None:
    """REV-E1, laws 2 and 3: only a scheduled retry raises the attempt, and a second verb changes nothing."""
    backend = MemoryBackend(clock=ManualClock())
    await backend.publisher.publish(Task(key="k", id="t"))
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    other = Ack(None) if not isinstance(verb, Ack) else Bury("late", None)
    assert await settle(backend, subscription, delivery, verb) is Settled.OK
    assert await settle(backend, subscription, delivery, other) is Settled.LEASE_LOST
    (status,) = await backend.control.statuses("k", "t")
    assert status is not None
    assert (status.state, status.attempt) == (state, attempt)
    assert await backend.control.results("k", "t") == (getattr(verb, "result", None),)
    assert (await backend.control.ledger("k")).balanced
    await backend.aclose()


async def test_the_same_verb_again_is_ok() -> None:
    """Fault E2: where the answer got lost the same settlement is sent again, and takes effect once."""
    backend = MemoryBackend(clock=ManualClock())
    await backend.publisher.publish(Task(key="k", id="t"))
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    for _ in range(3):
        verdict = await settle(backend, subscription, delivery, ScheduleRetry(5, "boom"))
        assert verdict is Settled.OK
    stats = await backend.control.stats("k")
    assert (stats.retried, stats.ledger.scheduled, stats.ledger.published) == (1, 1, 1)
    await backend.aclose()


def scripted(**options: Any) -> Any:
    """A backend that only notes what it is asked."""
    return ScriptedBackend(**options)


@pytest.mark.parametrize("atomic", [True, False])
async def test_as_few_steps_as_the_backend_can(*, atomic: bool) -> None:
    """With ``atomic_retry`` the delivery goes along and nothing is acked; without, it is acked once that is stored."""
    backend = scripted(atomic_retry=atomic)
    assert await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom")) is Settled.OK
    retry = ("schedule_retry", "t", 1005.0, "boom", None, DELIVERY)
    assert backend.calls == ([retry] if atomic else [retry, ("ack", "r", ())])


async def test_no_ack_without_a_stored_retry() -> None:
    """Where the retry cannot be stored the delivery stays as it is, to come back."""
    backend = scripted()
    backend.publish_errors = [BackendUnavailable("down")]
    with pytest.raises(BackendUnavailable):
        await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom"))
    assert [call[0] for call in backend.calls] == ["schedule_retry"]


async def test_a_second_try_has_the_same_token() -> None:
    """Fault E2: after a crash between the steps the retry is stored once, for the attempt is its token."""
    backend = scripted()
    backend.ack_errors = [BackendUnavailable("down")]
    with pytest.raises(BackendUnavailable):
        await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom"))
    assert await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom")) is Settled.OK
    retries = [call[4:] for call in backend.calls if call[0] == "schedule_retry"]
    assert retries == [(None, DELIVERY)] * 2


async def test_a_lost_lease_is_an_answer() -> None:
    """Law 2: a stale receipt is told, not raised."""
    backend = scripted()
    backend.ack_errors = [LeaseLost("stale")]
    assert await settle(backend, backend, DELIVERY, Ack(None)) is Settled.LEASE_LOST


async def test_no_dead_letters_no_silent_end() -> None:
    """A backend without dead letters says so; nothing is acked instead."""
    backend = scripted()
    with pytest.raises(CapabilityMissing, match="dead_letters"):
        await settle(backend, backend, DELIVERY, Bury("bad", None))
    assert backend.calls == []
