"""What authors of backends need not write again."""

import asyncio
from collections.abc import Iterator

from taskqueue_core.authoring.helpers import LocalSubscription
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, Received, Task

DELIVERY = Delivery(task=Task(key="k", id="t"), receipt="r", attempt=1, delivered_at=0.0)


class Scripted(LocalSubscription):
    """Answers what the test says, a step each."""

    in_flight = 0

    def __init__(self, *steps: Received) -> None:
        super().__init__(ManualClock(), ("k",), "worker")
        self._steps: Iterator[Received] = iter(steps)

    def take(self, limit: int) -> Received:
        """Answer the next one."""
        assert limit == 1
        return next(self._steps)

    async def close(self) -> None:
        """End what waits."""
        self.closed = True
        self.notify()


async def test_a_bounded_step_is_followed_by_the_next() -> None:
    """G6: a step that only says that there is more is followed by another; between them others have their turn."""
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
    """A close or a cancellation ends a receive that goes from step to step; without a timeout it is one step."""
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
