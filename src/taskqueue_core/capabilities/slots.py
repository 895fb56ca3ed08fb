"""``slots``: fenced leases on what endpoints run at once.

An *endpoint* is one model on one server. Each has a number of *slots*; a client takes the lease of one before it sends
a job. A lease is in one of three states:

========== ================================================ ===================================================
unassigned held by a client that looks for a job            free when it runs out, or the endpoint gets no jobs
assigned   bound to a job, which may be on the server       when it runs out, free once the server is seen idle
detached   its job runs on the server without its holder    as assigned, but its time is the job's, not its holder's
========== ================================================ ===================================================

A lease runs out at its ``expires_at``. One with a job is *overdue* from then on: held all the same, and its token is
good. Where the server does not report what it runs, the lease ends by its time alone.

Laws, which the kit checks:

* A slot has one holder at most, and a job one lease at most: assigning a job that has one already takes that one over.
* Each lease has a token of its own, with a fence that rises. A stale token changes nothing.
* ``held + free == slots`` for each endpoint at every instant (where slots were taken away, ``held`` may be more).
* No slot is lost: a slot that is not released becomes free by its time or by `SlotPool.reconcile`.
* No slot is kept for a job that may not come: the verbs that have an endpoint get no jobs end its unassigned leases in
  the same step, however often they were renewed. Those with a job stay.
* No lease with a job ends by arithmetic on times where the server can be asked what it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from taskqueue_core.capabilities.room import RoomSignal
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_label, check_number, kind_of

__all__ = [
    "Endpoint",
    "EndpointInfo",
    "Left",
    "Permit",
    "PoolView",
    "Seen",
    "SlotLease",
    "SlotPool",
]


class Permit(StrEnum):
    """The state of a lease."""

    UNASSIGNED = "unassigned"
    ASSIGNED = "assigned"
    DETACHED = "detached"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one server. Checked when it is made: an invalid one raises `InvalidInput`."""

    model: str
    """any printable text"""
    server: str
    """any printable text; a server may have several models"""
    url: str
    slots: int
    """how many jobs of the model it runs at once"""
    priority: int = 5
    """0 to 9; the slots of a higher one are given first"""
    reports: bool = True
    """its server reports what it runs: it gets jobs once it is healthy, and keeps slots that it says are in use"""
    together: int | None = None
    """how many jobs of all its models the server runs at once, unassigned slots included; what was registered last
    for one of them counts. None: no such limit"""

    def __post_init__(self) -> None:
        """Check every field."""
        check_label("model", self.model)
        check_label("server", self.server)
        url: object = self.url
        if not isinstance(url, str) or not 0 < len(url) <= LIMITS.url:
            raise InvalidInput("url", kind_of(url), f"1 to {LIMITS.url} characters")
        check_number("slots", self.slots, 1, LIMITS.slots)
        check_number("priority", self.priority, 0, 9)
        if self.together is not None:
            check_number("together", self.together, 1, LIMITS.slots)


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint at a glance."""

    endpoint: Endpoint
    healthy: bool
    """whether it was well when it was last looked at; one that does not report always is"""
    draining: bool = False
    """it gets no more jobs; running ones continue"""
    removed: bool = False
    """likewise, and it is forgotten with its last lease"""
    resting_until: float | None = None
    """it gets no jobs before this time"""
    unassigned: int = 0
    assigned: int = 0
    """those that are bound to a job, with the ones that ran out"""
    detached: int = 0
    overdue: int = 0
    """how many of those with a job ran out, and wait to be reconciled"""
    last_model: str | None = None
    """of which model its server was given a job last"""

    @property
    def held(self) -> int:
        """How many slots have a holder."""
        return self.unassigned + self.assigned + self.detached

    @property
    def free(self) -> int:
        """How many have none."""
        return max(0, self.endpoint.slots - self.held)

    @property
    def usable(self) -> bool:
        """Whether it may get jobs, but for a rest."""
        return self.healthy and not (self.draining or self.removed)


class SlotLease(msgspec.Struct, frozen=True, kw_only=True):
    """A held slot. Only a holder of the token can use, renew or release it."""

    model: str
    server: str
    url: str
    """the endpoint's present one"""
    holder: str
    token: str
    """``epoch.fence.random``: unguessable, the same for the life of a lease in one hand; the repr does not show it"""
    fence: int
    """rises with each token of the pool"""
    state: Permit
    job: str | None = None
    expires_at: float
    """store's time"""
    switched: bool = False
    """its server was given a job of another model before: it may have to load this one. Before it has a job: so far"""
    resumed: bool = False
    """the job had this slot before; another holder may have sent it to the server already"""
    note: bytes | None = None
    """a note for the holder: see `SlotPool.leave`"""

    def __repr__(self) -> str:
        """Return it without its token, which is a secret, and without its note."""
        return (
            f"SlotLease({self.model!r} on {self.server!r}, {self.state.value}, job={self.job!r}, "
            f"holder={self.holder!r}, fence={self.fence}, expires_at={self.expires_at})"
        )


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a server said of one of its models."""

    active: int
    """how many jobs it runs"""
    jobs: frozenset[str] | None = None
    """the running jobs, if the server reports them; jobs of other pools among them"""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The pool, read in one step."""

    epoch: str
    """another one after the pool was emptied"""
    endpoints: tuple[EndpointInfo, ...] = ()
    """by model and order of registration"""
    leases: tuple[SlotLease, ...] = ()
    """by fence; without their tokens, which are their holders' alone: those are empty; and without notes"""


class Left(StrEnum):
    """What became of a note."""

    TAKEN = "taken"
    """the holder gets it with its next renewal"""
    LATE = "late"
    """the token is not the job's any more: it was put aside, and changes nothing"""


class SlotPool(Protocol):
    """The attribute ``slots`` of a backend with the capability. All of it is one partition: every call is one step.

    Times are in seconds, a ``ttl`` is more than 0. Models and servers are any printable text; holders and jobs are
    names as those of tasks. A call takes 1,000 leases at most. Methods raise `InvalidInput` for what is not so, and
    `BackendUnavailable` where the store is unavailable. `taskqueue_core.authoring.slot_checks` checks it all.
    """

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        """Add an endpoint, or change one: its leases stay, and lowering its slots ends none of them.

        One that was draining or removed is in use again; its health, rest and place in the order stay. A new one that
        ``reports`` is not healthy before it was seen.
        """
        ...

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        """Give it no more jobs, and end its unassigned leases; or give it some again. False if there is none such."""
        ...

    async def remove(self, model: str, server: str) -> bool:
        """Give it no more jobs, end its unassigned leases, and forget it once nothing of it is held.

        False if there is no such endpoint, or no more: one without a job is forgotten at once.
        What its server has in common is forgotten with its last endpoint.
        """
        ...

    async def rest(self, model: str, server: str, duration: float) -> bool:
        """Give it no jobs for so long from now on, whatever was before, and end its unassigned leases; 0 ends a rest.

        False if there is no such endpoint.
        """
        ...

    async def configure(self, model: str, document: bytes | None) -> None:
        """Keep a JSON document for a model, of at most 64 KiB; ``None`` takes it away."""
        ...

    async def documents(self) -> dict[str, bytes]:
        """Return the documents by model."""
        ...

    async def inspect(self, model: str | None = None) -> PoolView:
        """Return the pool, or what is of one model."""
        ...

    async def acquire(
        self,
        model: str,
        holder: str,
        *,
        ttl: float,
        limit: int = 1,
        releasing: Sequence[SlotLease] = (),
        idle: float | None = None,
    ) -> tuple[SlotLease, ...]:
        """Release some leases, and take up to ``limit`` free slots of a model, unassigned, for ``ttl``.

        Of endpoints that are healthy and not draining, removed or resting, with room on their server: the higher
        priority first, then those whose server was given this model last, then the least used, then the one registered
        first. With ``idle``, slots that others have held unassigned for longer than that since they took them are
        taken from them where there are too few, the oldest first, but none that were taken away since. Stale ones
        among ``releasing`` are passed over. Never an error for want of slots: the answer is shorter, or empty.
        """
        ...

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        """Bind leases to jobs, one after another, for ``ttl``; ``None`` for a stale lease, or one of another job.

        A job of the model that has a lease already gets that one instead, with a new token and holder, as ``resumed``
        and with its note, and the slot it came with is released: the holder before finds its token stale. Idempotent:
        the same pair again answers the same lease, the taken over one too, and makes a detached one assigned.
        """
        ...

    async def detach(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """Say that the jobs of leases run on by themselves, for ``ttl``; ``None`` for one stale or without a job.

        Their tokens stay valid: a holder of one may renew and release the lease, and leave notes for it.
        """
        ...

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """Keep leases for ``ttl`` from now on at least, with the notes left for them; ``None`` for a stale one.

        No lease ends earlier for it. One with a job that the pool has lost whole (`PoolView.epoch` is another one) is
        made again where its endpoint is registered and the job has none, even above its slots: that job runs. Its token
        and fence are new ones; the same renewal again answers the same lease.
        """
        ...

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        """Give slots back; False for a stale lease. Notifies clients that wait for a slot of the model."""
        ...

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        """Leave a note for the holder of a job's lease, in place of an earlier one, and notify its model's signal.

        It is JSON text, as large as a result at most, and part of every answer about the lease. One with a stale
        token is put aside, and so is one whose lease ends by time or by `reconcile`: the last 8 of a job, for an hour,
        the last 1,000 and 16 MiB of the pool. One whose lease is released is dropped.
        """
        ...

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        """Return the notes of a job that were put aside, oldest first."""
        ...

    async def reconcile(
        self, model: str, server: str, observed: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        """Hold an endpoint's leases against what its server said, ``None`` if it did not answer; return what it lacks.

        Without an answer an endpoint that reports is not healthy, and its unassigned leases end, untold. Those with a
        job stay, and so does what was missed. With an answer a healthy endpoint stays so, and another is once no more
        is active than leases have a job, or no more than was seen ``settled`` seconds ago or before (that is others'
        work).

        A lease with a job is *missed* where ``seen.jobs`` lacks it, or without ``jobs`` where nothing is active, or
        where less is active than leases have a job and it has run out; of those the ones that ran out first come first,
        as many as there are fewer. It ends when it is missed twice with the same ``active``, at least ``settled``
        seconds of the store's time apart, with its token unchanged and nothing to the contrary seen between. What ended
        so is returned by fence and as in a `PoolView`.
        """
        ...

    def slot_signal(self, *models: str) -> RoomSignal:
        """Make a signal for when a slot of one of the models may have become free, or a note was left there.

        What happens by time alone (a rest or a lease runs out) is notified by the next step that finds it, not before.
        """
        ...
