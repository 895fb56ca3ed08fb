"""`LocalSubscription`: the base class whose ``receive`` waits and takes steps for the subscription of a backend."""

import asyncio
from collections.abc import Iterator

from taskqueue_core.authoring.helpers import LocalSubscription
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, Received, Task

DELIVERY = Delivery(task=Task(key="k", id="t"), receipt="r", attempt=1, delivered_at=0.0)


class Scripted(LocalSubscription):
    """A subscription whose steps return the results that the test gives, one per step."""

    in_flight = 0

    def __init__(self, *steps: Received) -> None:
        super().__init__(ManualClock(), ("k",), "worker")
        self._steps: Iterator[Received] = iter(steps)

    def take(self, limit: int) -> Received:
        """Return the result of the next step."""
        assert limit == 1
        return next(self._steps)

    async def close(self) -> None:
        """Close the subscription and wake a waiting receive."""
        self.closed = True
        self.notify()


async def test_a_bounded_step_is_followed_by_the_next() -> None:
    """G6: if a bounded step only reports that more work is available, a receive takes another step.

    Between two steps, other tasks of the event loop can run.
    """
    subscription = Scripted(*[Received(again=True)] * 3, Received(deliveries=(DELIVERY,)))
    waiting = asyncio.create_task(subscription.receive(1, None))
    turns = 0
    while not waiting.done():
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20, "the receive sleeps, although its store has more"
    assert waiting.result().deliveries == (DELIVERY,)
    assert turns > 3


async def test_a_receive_between_two_steps_ends() -> None:
    """Closing or cancelling ends a receive between two of its steps.

    A receive with a timeout of 0 takes just one step.
    """
    endless = Scripted(*[Received(again=True)] * 1000)
    assert await endless.receive(1, 0) == Received(again=True)
    waiting = asyncio.create_task(endless.receive(1, None))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    waiting = asyncio.create_task(endless.receive(1, None))
    await asyncio.sleep(0)
    await endless.close()
    assert await waiting == Received()
