"""The contract: what every backend must have. `docs/writing-a-backend.md` explains it, the conformance kit proves it.

A backend stores tasks and performs transitions, each in one atomic step. It decides nothing about
policy (core decides "retry at T" or "give up"), fires no hooks and measures nothing (core's wrapper
does). Further capabilities have a small protocol each in `taskqueue_core.capabilities`, and are
declared in `Capabilities`.

Promises that hold for every method:

* Arguments are valid: a `Task` cannot be made otherwise.
* Cancelling a call at any point loses nothing: it happened whole or not at all, and what it handed
  out without anybody seeing it comes back. One that changes a whole queue may go in several steps,
  each whole or not at all.
* Where the store is unavailable `BackendUnavailable` is raised, and nothing else is.
* Times are Unix seconds of the store's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import msgspec

from taskqueue_core.tasks import Confirmation, Delivery, Health, Received, Settled, Task

__all__ = ["Backend", "Capabilities", "Capability", "Publisher", "Subscription"]


class Publisher(Protocol):
    """Puts tasks in."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Store tasks and confirm each, in the order given; one refused task does not hold up the others.

        Confirmed means stored with the queue's durability. Idempotent: the same key and id is
        stored once while the task lives and for the queue's ``dedupe_window`` after (law 7);
        ``duplicate`` where the payload is the same, ``conflict`` where it is not. A task with
        ``not_before`` waits in ``scheduled`` (law 8).

        Raises `PublishUnconfirmed` where the store's response was lost: publish again with the same
        ids.
        """
        ...

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        """Schedule the next attempt of ``task`` at time ``at``, as the caller has decided.

        With ``settles``, the delivery in hand: one atomic transition ends its receipt and moves the
        entry to ``scheduled`` with the next attempt. Raises `LeaseLost` if the receipt is stale. (A
        backend without ``atomic_retry`` makes a new entry and leaves the delivery alone: core acks
        it after.)

        Without it: the task's entry, if it is live or dead, is moved likewise and its receipt, if
        any, ends; where it has ended otherwise, a new one is made (so ``published`` grows by one),
        even if the store has forgotten the task.

        Idempotent by ``token``, which is looked at first: a second call with the same one answers
        ``duplicate`` and changes nothing. The default token is the attempt that was delivered
        last. Never refused, never dropped under back-pressure (law 6).
        """
        ...


class Subscription(Protocol):
    """A consumer's view over a set of keys. Its deliveries stay leased while it is open and alive, however long."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Take up to ``limit`` deliveries over all keys, in one atomic step; wait up to ``timeout`` seconds for one.

        ``None`` waits without end, 0 not at all. Within a key higher priorities come before lower,
        and within a lane returned entries before new ones, in the order of becoming available
        (law 4): what fell due comes before what was published later. With ``order`` the queue's settings may
        have tenants take turns, and tasks with the same ordering_key run one after another. The keys take
        turns, so none starves. An empty answer is not an error: nothing there, paused, limited, or closed
        meanwhile. One receive at a time per subscription. Raises `SubscriptionClosed` if it was
        closed before the call.
        """
        ...

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """End deliveries as executed, and store the results (JSON text, one per delivery or none at all)."""
        ...

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Hand deliveries back: available at once, ahead of new tasks of their lane; the attempt stays (law 3).

        ``lost`` says that the consumer vanished with them: that counts a loss. An entry with more
        than the queue's ``max_losses`` goes to the dead letters instead and its answer is
        `Settled.DEAD`.

        This and the other settlements answer per receipt. A stale receipt changes nothing (law 2):
        it answers ``lease_lost`` in a batch, and raises `LeaseLost` when it is the only one. The
        settlement that ended a task's last delivery answers the same when it is sent again, while
        the task is remembered. Any open subscription of the backend may settle any receipt, but only
        its owner can declare it lost: one that another has adopted meanwhile answers ``lease_lost``.
        """
        ...

    async def close(self) -> None:
        """Release everything still owned, at once (not as lost), and end a waiting receive. Idempotent."""
        ...

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Iterate over deliveries one by one, until closed."""
        ...

    async def __aenter__(self) -> Self:
        """Return the subscription itself."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        ...


class Capability(StrEnum):
    """What a backend may have beyond the contract, each with its protocol in `taskqueue_core.capabilities`."""

    DEAD_LETTERS = "dead_letters"
    HANDOVER = "handover"
    REVOCATION = "revocation"
    CONTROL = "control"
    FLOW = "flow"
    """keeps the limits among its queues' settings: capacity, max_inflight, rate_limit, pauses, max_processing_time"""
    ORDER = "order"
    """keeps the order among its queues' settings (fair, with limits per tenant; floor_share), and ordering keys"""
    FAN_OUT = "fan_out"
    """keeps ``bound_to`` among its queues' settings"""
    SLOTS = "slots"
    """leases the slots of endpoints"""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend declares. The kit tests what is declared, and core refuses what is not."""

    names: frozenset[Capability] = frozenset()
    shared: bool = False
    """several processes see the same tasks"""
    durable: bool = False
    """tasks outlive the process"""
    atomic_retry: bool = True
    """``schedule_retry(settles=...)`` is one transition"""


class Backend(Protocol):
    """One store. Making it does no input or output; the first call connects."""

    @property
    def capabilities(self) -> Capabilities:
        """Say what it can do; constant."""
        ...

    @property
    def publisher(self) -> Publisher:
        """The one publisher; safe for concurrent use."""
        ...

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        """Open a subscription for a worker identity. Several may share one; each owns its own deliveries."""
        ...

    def now(self) -> float:
        """Return the store's time, as well as this process knows it."""
        ...

    async def health(self) -> Health:
        """Ask the store. Never raises: what is wrong is in the answer."""
        ...

    async def aclose(self) -> None:
        """Close every subscription and connection. Idempotent."""
        ...
