"""The contract that every backend must implement.

`docs/writing-a-backend.md` explains the contract, and the conformance kit tests it. Docstrings refer to the numbered
laws in `docs/laws.md`, and use the terms in `docs/glossary.md`, such as *entry*.

A backend stores tasks and changes their states, each change in one atomic step. It makes no retry decisions: core
decides whether a task is retried, and when. It calls no hooks and records no metrics: core's wrapper does. It declares
its optional capabilities in `Capabilities`; each of them has a protocol in `taskqueue_core.capabilities`.

The following holds for every method:

* Tasks are valid, because the constructor of `Task` checks them.
* A call passes at most `Limits.call` tasks, deliveries or receipts; more, or a larger ``limit`` of a receive, raises
  `InvalidInput` and changes nothing.
* Cancelling a call at any point loses nothing. The call has taken either full effect or none, and deliveries that it
  did not return become available again. A call that changes a whole queue may take several steps; each step takes full
  effect or none.
* If the store is unavailable, the method raises `BackendUnavailable`, unless its docstring says otherwise.
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
    """The part of a backend that stores new tasks and schedules retries."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Store tasks, and return their confirmations in the same order.

        Refusing one task does not affect the other tasks. A confirmed task is stored with the durability of its queue.
        Publishing is idempotent: until a task has ended, and for the queue's ``dedupe_window`` afterwards, a second
        task with its key and id is not stored (law 7). The second task's confirmation is ``duplicate`` if the payloads
        are equal, and ``conflict`` if they differ. With the capability ``unique``, a task that another one keeps out by
        its `UniqueKey` takes no room and is not refused for lack of it; ``existing_id`` names the other one.

        A task with ``not_before`` stays in the state ``scheduled`` until that time (law 8).

        Raises `PublishUnconfirmed` if the store's response was lost; the caller should publish again with the same ids.
        """

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        """Schedule the next attempt of ``task`` at the time ``at``.

        ``free`` means that the attempt before it does not count: `Delivery.prior` increases by one as well. The retry
        of a dead letter makes all its attempts available again, with or without ``free``.

        ``error`` is added to the task's history, with the last `Limits.traceback` bytes of ``traceback``. The last 3
        failures in the history keep their tracebacks. Without ``error``, ``traceback`` is ignored.

        ``settles`` is the caller's current delivery of the task. If it is given, one atomic step ends its receipt and
        moves the task's entry to ``scheduled`` with the next attempt number. Raises `LeaseLost` if the receipt is
        stale. (A backend without ``atomic_retry`` creates a new entry and does not change the delivery; core acks the
        delivery afterwards.)

        Without ``settles``, a live or dead entry of the task is moved to ``scheduled`` in the same way, and its
        receipt, if it has one, ends. If the task has ended without becoming a dead letter, or the store no longer knows
        it, a new entry is created, and the queue's `Ledger.published` increases by one.

        The call is idempotent by ``token``, which is checked first: a second call with the same token returns
        ``duplicate`` and changes nothing. The default token is derived from the attempt that was delivered last. A
        retry is never refused, not even by a full queue (law 6).
        """


class Subscription(Protocol):
    """A consumer's access to a set of keys. Its deliveries stay leased while it is open and its consumer is alive."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Receive up to ``limit`` deliveries from all keys in one atomic step, waiting up to ``timeout`` seconds.

        A timeout of ``None`` waits indefinitely, and 0 does not wait. Within a key, tasks with a higher priority come
        first. Within a priority, released tasks come before new tasks; both are in the order in which they became
        available (law 4). With the capability ``fair_order``, the queue's settings may let tenants take turns; with
        ``ordering_keys``, tasks with the same ``ordering_key`` run one after another. The keys take turns too, so that
        no key is starved.

        A receive may return fewer deliveries than are available, for example because their tasks are large; then
        `Received.again` is set.

        An empty result is not an error: the queues may be empty, paused or at a limit, or the subscription was closed
        during the call. Only one receive may run per subscription at a time. Raises `SubscriptionClosed` if the
        subscription was closed before the call.
        """

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """End the deliveries of tasks that were executed, and store the results of the tasks.

        ``results`` is empty, or contains one item per delivery: the result as JSON text, or ``None``.
        """

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Release deliveries. Their tasks are available at once, ahead of new tasks, with the same attempt (law 3).

        ``lost`` means that the consumer crashed or stopped responding; each task counts a loss. A task with more
        losses than the queue's ``max_losses`` becomes a dead letter, and its result is `Settled.DEAD`.

        Like every settlement, this returns one result per receipt. A stale receipt changes nothing (law 2): its result
        is ``lease_lost`` in a batch, and a call with only this receipt raises `LeaseLost`. Repeating the settlement
        that ended a task's last delivery returns the same result again, until the store deletes the record of the task.
        Any open subscription of the backend may settle any receipt, but only the owner may settle it as lost: if
        another subscription has adopted the receipt, the result is ``lease_lost``.
        """

    async def close(self) -> None:
        """Release the subscription's deliveries without counting losses, and end a waiting receive. Idempotent."""

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Iterate over deliveries one by one, until the subscription is closed."""

    async def __aenter__(self) -> Self:
        """Return the subscription itself."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the subscription."""


class Capability(StrEnum):
    """An optional ability of a backend. The protocols are in `taskqueue_core.capabilities`."""

    DEAD_LETTERS = "dead_letters"
    HANDOVER = "handover"
    REVOCATION = "revocation"
    CONTROL = "control"
    FLOW = "flow"
    """enforces the limits in the settings of queues: capacity, max_inflight, rate_limit, pauses, max_processing_time"""
    ORDERING_KEYS = "ordering_keys"
    """executes tasks with the same ordering key one after another"""
    FAIR_ORDER = "fair_order"
    """supports the settings with which tenants take turns: order ``fair``, weights, and the limits of each tenant"""
    FLOOR_SHARE = "floor_share"
    """supports the setting ``floor_share``: a share of the deliveries is reserved for each priority"""
    FAN_OUT = "fan_out"
    """supports the setting ``bound_to``: a published task is copied into several queues"""
    UNIQUE = "unique"
    """decides by the unique key of a task, in the step of its publish, whether it is stored"""
    AFTER = "after"
    """lets tasks wait for other tasks, and counts the members of batches"""
    SLOTS = "slots"
    """leases the slots of endpoints to dispatchers"""
    AUDIT = "audit"
    """keeps a log of what operators have done"""
    SCHEDULES = "schedules"
    """keeps schedules, and publishes the task of each instant exactly once"""
    LISTING = "listing"
    """lists tasks by state, tenant, tag and worker, and supports the settings ``index`` and ``keep_ended``"""
    STREAMS = "streams"
    """keeps events of running tasks for readers in other processes; the queue's settings limit how many"""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities that a backend declares. The conformance kit tests them, and core relies on no other abilities."""

    names: frozenset[Capability] = frozenset()
    shared: bool = False
    """whether several processes can work on the same tasks"""
    durable: bool = False
    """whether tasks are still stored after the process that uses the backend has ended"""
    atomic_retry: bool = True
    """whether ``schedule_retry(settles=...)`` ends the delivery and schedules the retry in one atomic step"""


class Backend(Protocol):
    """An object that gives core access to one store. The constructor performs no I/O; the first call connects."""

    @property
    def capabilities(self) -> Capabilities:
        """The declared capabilities, which never change."""

    @property
    def publisher(self) -> Publisher:
        """The publisher, which is always the same object and safe for concurrent use."""

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        """Open a subscription for the worker id ``consumer``. Several subscriptions may have the same id."""

    def now(self) -> float:
        """Return this process's estimate of the current time on the store's clock, in Unix seconds."""

    async def health(self) -> Health:
        """Check whether the store executes changes. Errors are not raised, but reported in the result."""

    async def aclose(self) -> None:
        """Close all subscriptions and connections. Idempotent."""
