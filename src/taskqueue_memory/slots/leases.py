"""What the slot pool keeps: servers, their endpoints, and the leases on those."""

from __future__ import annotations

import math

import msgspec

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Permit, SlotLease


class SlotServer:
    """What the models of one server share."""

    __slots__ = ("last_model", "positions", "together")

    def __init__(self) -> None:
        """Start without a model."""
        self.positions: dict[str, SlotPosition] = {}
        """by model"""
        self.together: int | None = None
        self.last_model: str | None = None

    @property
    def held(self) -> int:
        """How many slots of all its models have a holder."""
        return sum(len(position.leases) for position in self.positions.values())

    @property
    def room(self) -> float:
        """How many jobs more it may be given."""
        return math.inf if self.together is None else self.together - self.held


class SlotPosition:
    """One endpoint, with its leases."""

    __slots__ = (
        "draining", "endpoint", "leases", "number", "removed", "rests_until", "server", "surplus", "well",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, server: SlotServer, number: int) -> None:
        """Start with nothing held, before any check."""
        self.endpoint = endpoint
        self.server = server
        self.number = number
        """by order of registration"""
        self.leases: dict[str, Lease] = {}
        """by token"""
        self.well = False
        """whether it was well when it was last looked at"""
        self.surplus: tuple[int, float] | None = None
        """what it ran, and when, as it ran more than was held and was not well"""
        self.draining = False
        self.removed = False
        self.rests_until = -math.inf

    @property
    def healthy(self) -> bool:
        """See `EndpointInfo.healthy`."""
        return self.well or not self.endpoint.reports

    @property
    def room(self) -> float:
        """How many slots can be taken, of itself and of its server; below 0 where slots were taken away."""
        return min(self.endpoint.slots - len(self.leases), self.server.room)

    @property
    def with_job(self) -> list[Lease]:
        """The leases with a job, the oldest first."""
        bound = (lease for lease in self.leases.values() if lease.job is not None)
        return sorted(bound, key=lambda lease: lease.fence)

    def may_give(self, now: float) -> bool:
        """Whether it may get jobs."""
        return self.healthy and not self.draining and not self.removed and self.rests_until <= now

    def merit(self) -> tuple[int, bool, int, int]:
        """Return what slots are given by: the least first."""
        last = self.server.last_model == self.endpoint.model
        return (-self.endpoint.priority, not last, len(self.leases), self.number)

    def info(self, now: float) -> EndpointInfo:
        """Return it at a glance."""
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


class Lease:
    """One slot, held."""

    __slots__ = (
        "expires_at", "fence", "holder", "job", "mark", "missed", "note", "position", "resumed", "since", "state",
        "switched", "token", "via",
    )  # fmt: skip

    def __init__(
        self, position: SlotPosition, holder: str, *, token: str, fence: int, now: float
    ) -> None:
        """Start unassigned."""
        self.position = position
        self.holder = holder
        self.token = token
        self.fence = fence
        self.since = now
        """when it was taken"""
        self.state = Permit.UNASSIGNED
        self.job: str | None = None
        self.expires_at = math.inf
        self.switched = False
        self.resumed = False
        self.note: bytes | None = None
        self.via: str | None = None
        """the token that was renewed into this one: a client that did not get the answer sends it again"""
        self.missed: tuple[int, float] | None = None
        """what its server ran, and when, as it was first missed there"""
        self.mark = 0
        """names the date on which it runs out"""

    def ends_by_time(self) -> bool:
        """Whether it ends when it runs out: its server cannot be asked for its job, or it has none."""
        return self.job is None or not self.position.endpoint.reports

    def to_slot_lease(self) -> SlotLease:
        """Return it as its holder sees it."""
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
        """Return it as others see it."""
        return msgspec.structs.replace(self.to_slot_lease(), token="", note=None)
