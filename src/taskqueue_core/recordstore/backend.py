"""The backend on a `RecordStore`, with all its parts."""

from __future__ import annotations

from collections.abc import Iterable

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Durability
from taskqueue_core.clock import Clock
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.recordstore.control import RecordControl, RecordDeadLetters
from taskqueue_core.recordstore.publisher import RecordPublisher
from taskqueue_core.recordstore.store import RecordStore
from taskqueue_core.recordstore.subscription import RecordSubscription
from taskqueue_core.recordstore.transitions import Transitions
from taskqueue_core.tasks import Health


class RecordBackend:
    """A backend on a `RecordStore`, with the capabilities ``dead_letters``, ``control`` and ``flow``.

    The first call opens the store. ``durable`` means that confirmed tasks survive the end of the process and a power
    failure; then settings may require any durability up to `Durability.DISK`.
    """

    def __init__(self, name: str, store: RecordStore, clock: Clock, *, durable: bool) -> None:
        self.capabilities = Capabilities(
            names=frozenset({Capability.DEAD_LETTERS, Capability.CONTROL, Capability.FLOW}),
            durable=durable,
        )
        self._name = name
        self._transitions = Transitions(store, clock)
        self.publisher = RecordPublisher(self._transitions)
        self.dead_letters = RecordDeadLetters(self._transitions)
        durabilities = {Durability.MEMORY, Durability.PROCESS, Durability.DISK}
        self.control = RecordControl(
            self._transitions, durabilities if durable else {Durability.MEMORY}
        )

    def subscribe(self, keys: Iterable[str], consumer: str) -> RecordSubscription:
        self._transitions.ensure_open()
        return RecordSubscription(self._transitions, keys, consumer)

    def now(self) -> float:
        """Return the time of this process, which is also the store's time."""
        return self._transitions.clock.now()

    async def health(self) -> Health:
        """Check whether the store works, opening it if necessary. An error is in the details of the result."""
        try:
            with self._transitions.step():
                return Health(ok=True, backend=self._name)
        except TaskQueueError as error:
            return Health(ok=False, backend=self._name, details={"error": str(error)})

    async def aclose(self) -> None:
        """Close all subscriptions, then the store. If that fails, the store stays open; call this again."""
        for subscription in self._transitions.subscriptions.all:
            await subscription.close()
        self._transitions.close()
