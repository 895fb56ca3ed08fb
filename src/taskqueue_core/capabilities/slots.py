"""The capability ``slots``: leases with fencing tokens, which limit the number of jobs that an endpoint runs at once.

An *endpoint* is one model on one server. It has a number of *slots*; a client acquires the lease of a slot before it
sends a job. A lease is in one of three states:

========== ================================================ =====================================================
state      meaning                                          what frees the slot, besides a release
========== ================================================ =====================================================
unassigned held by a client that looks for a job            the lease expires, or the endpoint gets no more jobs
assigned   bound to a job, which may be on the server       two reports of the server lack the job (`reconcile`)
detached   its job runs on the server without a holder      as for assigned; the lease should outlast the job
========== ================================================ =====================================================

A lease expires at its ``expires_at``. A lease with a job is then *overdue*: the slot is still held, and the token is
still valid. If the server does not report its running jobs, the lease ends instead.

The conformance kit checks these laws:

* A slot has at most one holder, and a job at most one lease. Assigning a job that has a lease transfers that lease.
* Each lease has a token of its own, with an increasing fence. A stale token changes nothing.
* ``held + free == slots`` for each endpoint at every instant (``held`` may be larger after the slots were reduced).
* No slot is lost: a slot that is not released becomes free when its lease expires, or by `SlotPool.reconcile`.
* No slot is kept for a job that may never arrive: if an endpoint is given no more jobs, its unassigned leases end in
  the same step, however often they were renewed. Leases with a job are kept.
* A lease with a job does not end merely because it expires, if the server reports its running jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from taskqueue_core.capabilities.room import RoomSignal
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_label, check_number, kind_of


class Permit(StrEnum):
    """The state of a lease."""

    UNASSIGNED = "unassigned"
    ASSIGNED = "assigned"
    DETACHED = "detached"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one server. The constructor checks all fields, and raises `InvalidInput`."""

    model: str
    """name of the model, any printable text"""
    server: str
    """name of the server, any printable text; a server may run several models, each of which is an endpoint"""
    url: str
    """URL to which the model's jobs are sent"""
    slots: int
    """maximum number of the model's jobs that the server runs at once"""
    priority: int = 5
    """priority from 0 to 9; free slots of endpoints with a higher priority are granted first"""
    reports: bool = True
    """whether the server reports its jobs; it then gets jobs only while healthy, and expired leases of jobs are kept"""
    together: int | None = None
    """maximum number of leases of all endpoints of the server, which limits the jobs that it runs at once; ``None``: no
    limit. The value of the endpoint that was registered last applies to the whole server"""

    def __post_init__(self) -> None:
        check_label("model", self.model)
        check_label("server", self.server)
        url: object = self.url
        if not isinstance(url, str) or not 0 < len(url) <= LIMITS.url:
            raise InvalidInput("url", kind_of(url), f"text of 1 to {LIMITS.url} characters")
        check_number("slots", self.slots, 1, LIMITS.slots)
        check_number("priority", self.priority, 0, 9)
        if self.together is not None:
            check_number("together", self.together, 1, LIMITS.slots)


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint, its health and the use of its slots."""

    endpoint: Endpoint
    healthy: bool
    """whether `SlotPool.reconcile` found it healthy; always true if the server does not report its running jobs"""
    draining: bool = False
    """whether the endpoint is no longer given jobs; running jobs continue"""
    removed: bool = False
    """like ``draining``, but the endpoint is also deleted when its last lease ends"""
    resting_until: float | None = None
    """time until which the endpoint is given no jobs, in Unix seconds"""
    unassigned: int = 0
    assigned: int = 0
    """number of leases in the state ``assigned``, including expired leases"""
    detached: int = 0
    overdue: int = 0
    """number of leases that are bound to a job and have expired, but have not ended"""
    last_model: str | None = None
    """model of the job that the endpoint's server was given last"""

    @property
    def held(self) -> int:
        """The number of slots that have a lease."""
        return self.unassigned + self.assigned + self.detached

    @property
    def free(self) -> int:
        """The number of slots that have no lease."""
        return max(0, self.endpoint.slots - self.held)

    @property
    def usable(self) -> bool:
        """Whether the endpoint may be given jobs, unless ``resting_until`` pauses it."""
        return self.healthy and not (self.draining or self.removed)


class SlotLease(msgspec.Struct, frozen=True, kw_only=True):
    """The lease of a slot. Only the holder of its token can use, renew or release it."""

    model: str
    server: str
    url: str
    """the current URL of the lease's endpoint"""
    holder: str
    token: str
    """``epoch.fence.random``: unguessable, not shown by repr; changes when the lease is transferred or created again"""
    fence: int
    """fencing number, which increases with each token of the pool"""
    state: Permit
    job: str | None = None
    expires_at: float
    """time at which the lease expires, in Unix seconds on the store's clock"""
    switched: bool = False
    """whether the server's previous job was of another model, so that the server may have to load this model"""
    resumed: bool = False
    """whether an earlier holder may have sent the job to a server: the job already had this lease, or has late notes"""
    note: bytes | None = None
    """a note for the holder, stored by `SlotPool.leave`"""

    def __repr__(self) -> str:
        """Return the lease as text, without its secret token and without its note."""
        return (
            f"SlotLease({self.model!r} on {self.server!r}, {self.state.value}, job={self.job!r}, "
            f"holder={self.holder!r}, fence={self.fence}, expires_at={self.expires_at})"
        )


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A server's report about one of its models."""

    active: int
    """number of the model's jobs that the server is running"""
    jobs: frozenset[str] | None = None
    """ids of these jobs, whichever pool they are from; ``None`` if the server reports only their number"""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the pool, read in one atomic step."""

    epoch: str
    """an id that changes whenever the pool is emptied, for example because the store lost its data"""
    secret: str
    """a random text that clients of the store share, and that changes with the epoch; no lease contains it"""
    endpoints: tuple[EndpointInfo, ...] = ()
    """the endpoints, sorted by model and then by registration"""
    leases: tuple[SlotLease, ...] = ()
    """the leases, sorted by fence, without notes and with empty tokens, because only holders may know the tokens"""

    def __repr__(self) -> str:
        """Return the view as text, without its secret."""
        return f"PoolView(epoch={self.epoch!r}, endpoints={self.endpoints}, leases={self.leases})"


class Left(StrEnum):
    """The result of `SlotPool.leave`."""

    TAKEN = "taken"
    """the holder receives the note with its next renewal"""
    LATE = "late"
    """the token is stale: the note is only kept for `SlotPool.late`"""


class SlotPool(Protocol):
    """The attribute ``slots`` of a backend with the capability ``slots``.

    The whole pool is in one partition of the store, so that every call is one atomic step. Times are in seconds; a
    ``ttl`` is larger than 0. Names of models and servers are any printable text; ids of holders and jobs have the form
    of task ids. A call accepts at most 1,000 leases. Methods raise `InvalidInput` for other arguments
    (`taskqueue_core.authoring.slot_checks` checks them), and `BackendUnavailable`.
    """

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        """Add or change an endpoint. Its leases are kept, even if its number of slots is reduced.

        A draining or removed endpoint is put back into use; its health, its pause and its place in the order of
        registration are kept. A new endpoint with ``reports`` is unhealthy until `reconcile` finds it healthy.
        """

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        """Stop giving jobs to an endpoint, and end its unassigned leases; ``draining=False`` puts it back into use.

        Return False if the endpoint does not exist.
        """

    async def remove(self, model: str, server: str) -> bool:
        """Stop giving jobs to an endpoint, end its unassigned leases, and delete it once no slot is held.

        An endpoint without a job is deleted at once. Return False if the endpoint does not exist. When a server's last
        endpoint is deleted, the state of the server is deleted too.
        """

    async def rest(self, model: str, server: str, duration: float) -> bool:
        """Give an endpoint no jobs for ``duration`` seconds, and end its unassigned leases; 0 ends the pause.

        A new duration replaces an earlier one. Return False if the endpoint does not exist.
        """

    async def configure(self, model: str, document: bytes | None) -> None:
        """Store a JSON document of at most 64 KiB under the name of a model; ``None`` deletes it."""

    async def documents(self) -> dict[str, bytes]:
        """Return all documents, each under the name of its model."""

    async def inspect(self, model: str | None = None) -> PoolView:
        """Return the state of the whole pool, or only the endpoints and leases of one model."""

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
        """Release the leases in ``releasing``, and acquire up to ``limit`` unassigned leases of a model, for ``ttl``.

        The endpoint must be healthy and not draining, removed or paused, and its server must not be at its limit. Slots
        are granted in this order: higher priority; the server's last job was of this model; fewer slots in use;
        registered earlier. If ``idle`` is given and too few slots are free, the call also takes slots that other
        holders have kept unassigned for more than ``idle`` seconds, the oldest first. Stale leases in ``releasing`` are
        ignored. It is not an error if too few slots are free: the result is then shorter, or empty.
        """

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        """Bind leases to jobs for ``ttl``, pair by pair. Return ``None`` where a lease is stale or has another job.

        If the job already has a lease for this model, that lease is returned instead: with a new token and holder, with
        its note, and marked ``resumed``. The pair's own lease is then released, and the earlier token becomes stale.
        A lease for a job with late notes is marked ``resumed`` too. Idempotent: the same pair again returns the same
        lease, even after a transfer. Detached leases become assigned. Earlier reports that lack the job no longer count
        (`reconcile`), so a holder that has waited with a job calls this again before it sends the job.
        """

    async def detach(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """Let jobs continue without their holders for ``ttl``. Return ``None`` for a lease that is stale or has no job.

        The tokens stay valid: a client with a token may renew and release the lease, and leave notes for it.
        """

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """Extend leases to at least ``ttl`` from now, and return them with their notes; ``None`` if a lease is stale.

        A renewal never shortens a lease. If the pool was emptied (`PoolView.epoch` has changed), the lease of a running
        job is created again, with a new token and fence, if its endpoint is registered and the job has no other lease.
        This may exceed the endpoint's number of slots. Repeating the renewal returns the same lease.
        """

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        """Release slots, and notify clients that wait for a slot of the model. Return False for a stale lease."""

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        """Store a note for the holder of a job's lease, replacing an earlier note, and notify the model's signal.

        A note is JSON text, no larger than a result; each call that returns the lease to its holder returns the note
        too. A note with a stale token is stored as late. So is the note of a lease that ends without a release.
        Late notes are kept for an hour: at most the last 8 notes of a job, and the last 1,000 notes or 16 MiB of the
        pool. When a lease is released, its note is deleted.
        """

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        """Return the late notes of a job, oldest first."""

    async def reconcile(
        self, model: str, server: str, observed: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        """Compare an endpoint's leases with its server's report, and return the leases that ended.

        ``observed`` is ``None`` if the server did not answer. An endpoint with ``reports`` then becomes unhealthy, and
        its unassigned leases end. Leases with a job are kept. Earlier reports no longer count.

        If the server answered, a healthy endpoint stays healthy. An unhealthy endpoint becomes healthy if the server
        runs no more jobs than there are leases with a job, or no more than it ran at least ``settled`` seconds ago: the
        additional jobs must then belong to other clients.

        A lease with a job is *missed* if ``observed.jobs`` does not contain the job. If ``observed.jobs`` is ``None``,
        all leases with a job are missed if the server runs no job. If it runs fewer jobs than there are leases with a
        job, the difference is the number of expired leases that are missed, starting with the one that expired first.

        A lease ends when it is missed in two reports with the same ``active``, at least ``settled`` seconds apart on
        the store's clock, if it was not assigned again, it was missed in every report between the two, and the server
        was never silent between the two. The ended leases are returned sorted by fence, and, like those of a
        `PoolView`, have no notes and empty tokens.
        """

    def slot_signal(self, *models: str) -> RoomSignal:
        """Return a signal that is set when a slot of one of the models may have become free, or a note was stored.

        When a pause or a lease expires, the signal is set only by the next call that notices it.
        """
