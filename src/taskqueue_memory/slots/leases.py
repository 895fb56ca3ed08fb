"""Data structures of the slot pool: GPU servers, their endpoints, and the leases on their slots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Permit, SlotLease


@dataclass(slots=True, eq=False, repr=False)
class SlotServer:
    """A GPU server with its endpoints, one per model."""

    positions: dict[str, SlotPosition] = field(default_factory=dict)
    """endpoints by model"""
    together: int | None = None
    """maximum number of jobs that the server runs at the same time, across all models; None means no limit"""
    last_model: str | None = None

    @property
    def room(self) -> float:
        """The number of further jobs that the server may be given; infinity if it has no limit."""
        if self.together is None:
            return math.inf
        return self.together - sum(len(position.leases) for position in self.positions.values())


@dataclass(slots=True, eq=False, repr=False)
class SlotPosition:
    """One endpoint, with its leases."""

    endpoint: Endpoint
    server: SlotServer
    number: int
    """position in the order of registration"""
    leases: dict[str, Lease] = field(default_factory=dict)
    """leases by token"""
    well: bool = False
    """whether the endpoint was healthy at the last check"""
    surplus: tuple[int, float] | None = None
    """for an unhealthy endpoint with more jobs than leases: highest number of jobs, and when it was first reported"""
    draining: bool = False
    removed: bool = False
    rests_until: float = -math.inf

    @property
    def healthy(self) -> bool:
        return self.well or not self.endpoint.reports

    @property
    def room(self) -> float:
        """The number of free slots that the server's limit permits; negative after a reduction of the slots."""
        return min(self.endpoint.slots - len(self.leases), self.server.room)

    @property
    def with_job(self) -> list[Lease]:
        """The leases that are bound to a job, the oldest first."""
        bound = (lease for lease in self.leases.values() if lease.job is not None)
        return sorted(bound, key=lambda lease: lease.fence)

    def may_give(self, now: float) -> bool:
        """Return whether the endpoint may receive jobs."""
        return self.healthy and not self.draining and not self.removed and self.rests_until <= now

    def merit(self) -> tuple[int, bool, int, int]:
        """Return the sort key for choosing an endpoint; the endpoint with the smallest key is chosen."""
        last = self.server.last_model == self.endpoint.model
        return (-self.endpoint.priority, not last, len(self.leases), self.number)

    def info(self, now: float) -> EndpointInfo:
        """Return the state of the endpoint, with the number of leases in each state."""
        states = [lease.state for lease in self.leases.values()]
        return EndpointInfo(
            endpoint=self.endpoint,
            healthy=self.healthy,
            draining=self.draining,
            removed=self.removed,
            resting_until=self.rests_until if self.rests_until > now else None,
            unassigned=states.count(Permit.UNASSIGNED),
            assigned=states.count(Permit.ASSIGNED),
            detached=states.count(Permit.DETACHED),
            overdue=sum(lease.expires_at <= now for lease in self.with_job),
            last_model=self.server.last_model,
        )


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A slot that is reserved for one holder until a certain time."""

    position: SlotPosition
    holder: str
    token: str
    fence: int
    since: float
    """time at which the slot was acquired"""
    state: Permit = Permit.UNASSIGNED
    job: str | None = None
    expires_at: float = math.inf
    switched: bool = False
    resumed: bool = False
    note: bytes | None = None
    via: str | None = None
    """previous token of this lease, which a client sends again if it did not receive the new token"""
    missed: tuple[int, float] | None = None
    """if the server's last reports lack this lease's job: the number of jobs in them, and when it was first reported"""
    mark: int = 0
    """id of the current expiry time; 0 if there is none"""

    def ends_by_time(self) -> bool:
        """Return whether the lease ends when it expires: it has no job, or its server does not report its jobs."""
        return self.job is None or not self.position.endpoint.reports

    def to_slot_lease(self) -> SlotLease:
        """Return the lease as its holder sees it, with its token and note."""
        endpoint = self.position.endpoint
        return SlotLease(
            model=endpoint.model,
            server=endpoint.server,
            url=endpoint.url,
            holder=self.holder,
            token=self.token,
            fence=self.fence,
            state=self.state,
            job=self.job,
            expires_at=self.expires_at,
            switched=self.switched,
            resumed=self.resumed,
            note=self.note,
        )

    def shown(self) -> SlotLease:
        """Return the lease as other clients see it, without its token and note."""
        return msgspec.structs.replace(self.to_slot_lease(), token="", note=None)
