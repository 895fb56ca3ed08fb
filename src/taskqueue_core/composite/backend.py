"""The base of composite backends, which present several backends, or several queues of one backend, as one backend."""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from msgspec import structs

from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Backend, Capabilities, Capability, Publisher
from taskqueue_core.capabilities import (
    Audit,
    Control,
    DeadLetters,
    SlotPool,
    audit_of,
    control_of,
    dead_letters_of,
    slots_of,
)
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import DeadLetter, Delivery, Task, TaskStatus

T = TypeVar("T")

_PATIENCE = 2.0
"""seconds after which a call to an optional member times out"""
_PAUSE = 1.0
"""seconds for which a member is not called after a failed call"""


class Member:
    """One of the backends in a composite backend, and whether it is available. It must support ``control``."""

    def __init__(self, name: str, backend: Backend, *, needed: bool = False) -> None:
        self.name = name
        self.needed = needed
        """whether the member is called even if its last call failed"""
        self.backend = backend
        self.control: Control = control_of(backend)
        self._down_until = -math.inf

    @property
    def down_for(self) -> float:
        """The number of seconds until this member may be called again; 0 if it may be called now."""
        return max(0.0, self._down_until - asyncio.get_running_loop().time())

    def note_down(self) -> None:
        if not self.needed:
            self._down_until = asyncio.get_running_loop().time() + _PAUSE

    def note_up(self) -> None:
        self._down_until = -math.inf

    async def within(self, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``call``. Raises `BackendUnavailable` if it takes too long or a recent call failed."""
        if self.down_for:
            raise BackendUnavailable(f"the {self.name} backend is unavailable")
        try:
            async with asyncio.timeout(seconds):
                answer = await call()
        except TimeoutError:
            self.note_down()
            raise BackendUnavailable(f"the {self.name} backend does not answer") from None
        except BackendUnavailable:
            self.note_down()
            raise
        self.note_up()
        return answer


class QueuePart(NamedTuple):
    """A queue of one member: the number of the member, and the key of the queue in that member's backend."""

    member: int
    key: str


class ReceivePlan(NamedTuple):
    """The queues that a composite subscription receives from."""

    parts: tuple[QueuePart, ...]
    refresh_seconds: float | None = None
    """seconds after which the plan must be computed again; ``None`` means never"""


class CompositeSubscription(Protocol):
    """The methods of a subscription that its composite backend calls."""

    closed: bool

    def refresh_now(self) -> None: ...
    async def close(self) -> None: ...


class CompositeBackend(ABC):
    """A backend that consists of several members: the base class for sharding and migration."""

    publisher: Publisher
    control: Control
    in_turn = True
    """whether subscriptions receive from all parts in rotation, instead of from the oldest part first"""

    def __init__(self, *members: Member) -> None:
        """Take ownership of the members' backends. A subclass sets `publisher` and `control`."""
        self.members = members
        every = [member.backend.capabilities for member in members]
        self.capabilities = Capabilities(
            names=frozenset(Capability).intersection(*(each.names for each in every)),
            shared=all(each.shared for each in every),
            durable=all(each.durable for each in every),
            atomic_retry=all(each.atomic_retry for each in every),
        )
        self._subscriptions: set[CompositeSubscription] = set()

    @property
    def dead_letters(self) -> JointDeadLetters:
        """The dead letters of all members. Raises `CapabilityMissing` unless all members support dead letters."""
        return JointDeadLetters(self)

    @property
    def slots(self) -> SlotPool:
        """The slot pool of the last member. Raises `CapabilityMissing` unless all members have slots."""
        return [slots_of(member.backend) for member in self.members][-1]

    @property
    def audit(self) -> Audit:
        """The audit log of the last member. Raises `CapabilityMissing` unless all members have one."""
        return [audit_of(member.backend) for member in self.members][-1]

    def remember(self, subscription: CompositeSubscription) -> None:
        """Register an open subscription for `refresh_plans` and `aclose`."""
        self._subscriptions = {item for item in self._subscriptions if not item.closed}
        self._subscriptions.add(subscription)

    def refresh_plans(self) -> None:
        """Make every subscription compute its receive plan again, at once."""
        for subscription in self._subscriptions:
            subscription.refresh_now()

    async def aclose(self) -> None:
        for subscription in tuple(self._subscriptions):
            # If the close fails, the deliveries become available again when their leases expire.
            with contextlib.suppress(BackendUnavailable):
                await subscription.close()
        for member in reversed(self.members):
            await member.backend.aclose()

    def now(self) -> float:
        return self.members[-1].backend.now()

    @abstractmethod
    async def parts(self, key: str) -> Sequence[QueuePart]:
        """Return every part of the queue ``key``, oldest first."""

    async def current_parts(self, key: str) -> Sequence[QueuePart]:
        """Return the same as `parts`, with those that another process has just created."""
        return await self.parts(key)

    async def locate(
        self, key: str, task_ids: Sequence[str]
    ) -> list[tuple[QueuePart, TaskStatus] | None]:
        """Return, for each task, the part that has the task or had it last, and the task's status there.

        The item is ``None`` for an unknown task.
        """
        parts = await self.parts(key)
        answers = await asyncio.gather(
            *(
                self.ask(
                    member := self.members[part.member],
                    partial(member.control.statuses, part.key, *task_ids),
                )
                for part in parts
            ),
            return_exceptions=True,
        )
        found: list[list[tuple[QueuePart, TaskStatus]]] = [[] for _ in task_ids]
        errors: list[BaseException] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
                continue
            for candidates, status in zip(found, answer, strict=True):
                if status is not None:
                    candidates.append((part, structs.replace(status, key=key)))
        # A part whose call failed may have the tasks that were not found.
        if errors and not (found and all(found)):
            raise errors[0]
        return [
            max(candidates, key=lambda pair: (pair[1].state.live, pair[1].updated_at), default=None)
            for candidates in found
        ]

    @abstractmethod
    def public_key(self, part: QueuePart) -> str | None:
        """Return the public name of the queue that a part belongs to; ``None`` for an internal queue."""

    def public_name(self, member: int, key: str) -> str:
        """Return the public name of a member's queue, or ``key`` itself for an internal queue."""
        return self.public_key(QueuePart(member, key)) or key

    @abstractmethod
    def first_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the receive plan of a new subscription, without a call to a store."""

    @abstractmethod
    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the parts from which a subscription to ``keys`` should now receive."""

    @abstractmethod
    def from_member(self, member: int, delivery: Delivery) -> Delivery:
        """Return a member's delivery as consumers see it: its receipt also identifies the part that issued it."""

    @abstractmethod
    def origins(self, receipt: str, key: str) -> Sequence[tuple[QueuePart, str]]:
        """Return the parts of the queue ``key`` that may have issued a receipt, the most likely part first.

        Each part comes with the receipt as its member knows it. If ``key`` is empty, because the caller does not know
        the queue, the keys of the returned parts are empty, too.
        """

    def to_member(self, delivery: Delivery) -> tuple[int, Delivery]:
        """Return the number of the member that issued a delivery, and the delivery as that member knows it."""
        part, receipt = self.origins(delivery.receipt, delivery.task.key)[0]
        if receipt == delivery.receipt:
            return part.member, delivery
        task = renamed(delivery.task, part.key)
        return part.member, structs.replace(delivery, task=task, receipt=receipt)

    def adopted(self, member: int, receipt: str, delivery: Delivery) -> Delivery:
        """Return an adopted delivery of a member as consumers see it, with the ``receipt`` that they already have."""
        return structs.replace(self.from_member(member, delivery), receipt=receipt)

    def is_optional(self, member: Member) -> bool:  # noqa: ARG002 - overriding methods use the argument
        """Return whether the backend can work without this member. Calls to such a member have a timeout."""
        return False

    async def ask(self, member: Member, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call to a member. Raises `BackendUnavailable` if an optional member takes too long."""
        return await (member.within(_PATIENCE, call) if self.is_optional(member) else call())

    async def at_leisure(self, member: Member, call: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """Return the result of a call to a member, or ``otherwise`` if the member is optional and unavailable."""
        try:
            return await self.ask(member, call)
        except BackendUnavailable:
            if not self.is_optional(member):
                raise
            return otherwise


class JointDeadLetters:
    """Implementation of `DeadLetters` for a composite backend. Lists begin with the dead letters of the oldest part."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite
        self._of_member = [dead_letters_of(member.backend) for member in composite.members]

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        parts = all_parts = await self._composite.parts(key)
        if after is not None:
            while parts and await self._of_member[parts[0].member].get(parts[0].key, after) is None:
                parts = parts[1:]
            if not parts:
                parts, after = all_parts, None
        matches: list[DeadLetter] = []
        for part in parts:
            results = await self._of_member[part.member].list(
                part.key, limit=limit - len(matches), after=after
            )
            after = None
            matches += [self._renamed(dead_letter, key) for dead_letter in results]
            if len(matches) >= limit:
                break
        return tuple(matches)

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        for part in await self._composite.parts(key):
            dead_letter = await self._of_member[part.member].get(part.key, task_id)
            if dead_letter is not None:
                return self._renamed(dead_letter, key)
        return None

    def _renamed(self, dead_letter: DeadLetter, key: str) -> DeadLetter:
        return structs.replace(dead_letter, task=renamed(dead_letter.task, key))

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await self._sum(key, lambda letters, name: letters.redrive(name, *task_ids))

    async def discard(self, key: str, *task_ids: str) -> int:
        return await self._sum(key, lambda letters, name: letters.discard(name, *task_ids))

    async def _sum(self, key: str, call: Callable[[DeadLetters, str], Awaitable[int]]) -> int:
        parts = await self._composite.parts(key)
        return sum(await gather_all(call(self._of_member[part.member], part.key) for part in parts))


def renamed(task: Task, key: str) -> Task:
    """Return a copy of the task for the queue ``key``, without validating the fields again."""
    if task.key == key:
        return task
    copy: Task = task.__copy__()  # type: ignore[attr-defined] # msgspec has it, untyped
    structs.force_setattr(copy, "key", key)
    if task.batch is not None and task.batch == TaskRef(task.key, task.id):  # it is a batch itself
        structs.force_setattr(copy, "batch", TaskRef(key, task.id))
    return copy
