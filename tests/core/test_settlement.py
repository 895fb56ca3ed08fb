"""``settle``: carrying out a verb, on backends with an atomic retry and on backends without one."""

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
    """REV-E1, laws 2 and 3: each verb leads to its own state and only a retry raises the attempt.

    A second, different verb changes nothing.
    """
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
    """Fault E2: a retry that is sent again after a lost answer returns OK and takes effect once."""
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
    """Return a scripted backend, typed so that it can be used as a subscription too."""
    return ScriptedBackend(**options)


@pytest.mark.parametrize("atomic", [True, False])
async def test_as_few_steps_as_the_backend_can(*, atomic: bool) -> None:
    """With an atomic retry, one call retries and settles.

    Without it, the delivery is acked after the retry was stored.
    """
    backend = scripted(atomic_retry=atomic)
    assert await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom")) is Settled.OK
    retry = ("schedule_retry", "t", 1005.0, "boom", None, DELIVERY)
    assert backend.calls == ([retry] if atomic else [retry, ("ack", "r", ())])


async def test_no_ack_without_a_stored_retry() -> None:
    """If the retry cannot be stored, the delivery is not acked, so the task will be redelivered."""
    backend = scripted()
    backend.publish_errors = [BackendUnavailable("down")]
    with pytest.raises(BackendUnavailable):
        await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom"))
    assert [call[0] for call in backend.calls] == ["schedule_retry"]


async def test_a_second_try_has_the_same_token() -> None:
    """Fault E2: after a crash between retry and ack, the retry is sent again for the same delivery.

    The store recognises it by the attempt number, so it is stored once.
    """
    backend = scripted()
    backend.ack_errors = [BackendUnavailable("down")]
    with pytest.raises(BackendUnavailable):
        await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom"))
    assert await settle(backend, backend, DELIVERY, ScheduleRetry(5, "boom")) is Settled.OK
    retries = [call[4:] for call in backend.calls if call[0] == "schedule_retry"]
    assert retries == [(None, DELIVERY)] * 2


async def test_a_lost_lease_is_an_answer() -> None:
    """Law 2: settling with a stale receipt returns `LEASE_LOST` and raises no error."""
    backend = scripted()
    backend.ack_errors = [LeaseLost("stale")]
    assert await settle(backend, backend, DELIVERY, Ack(None)) is Settled.LEASE_LOST


async def test_no_dead_letters_no_silent_end() -> None:
    """Without the dead-letter capability, burying a task raises `CapabilityMissing`, and the delivery is not acked."""
    backend = scripted()
    with pytest.raises(CapabilityMissing, match="dead_letters"):
        await settle(backend, backend, DELIVERY, Bury("bad", None))
    assert backend.calls == []
