"""A model of a slot pool that is as simple as possible: every look-up searches plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Left, Permit, Seen, SlotLease

_LATE = 8


@dataclass(eq=False)
class Known:
    """A registered endpoint and its state."""

    endpoint: Endpoint
    well: bool = False
    surplus: tuple[int, float] | None = None
    draining: bool = False
    removed: bool = False
    rests_until: float = 0.0


@dataclass(eq=False)
class Held:
    """A lease of the model. Its token and fence are copied from the backend."""

    model: str
    server: str
    holder: str
    expires_at: float
    since: float
    state: Permit = Permit.UNASSIGNED
    job: str | None = None
    switched: bool = False
    resumed: bool = False
    note: bytes | None = None
    via: str | None = None
    missed: tuple[int, float] | None = None
    token: str = ""
    fence: int = 0


@dataclass
class SlotModel:
    """The state of a slot pool, and methods that apply calls of `SlotPool` to it. `tick` sets the time."""

    now: float = 0.0
    places: list[Known] = field(default_factory=list)
    leases: list[Held] = field(default_factory=list)
    together: dict[str, int | None] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    late: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)

    def endpoint(self, model: str, server: str) -> Known | None:
        """Return a registered endpoint, or ``None``."""
        named = ((p.endpoint.model, p.endpoint.server) for p in self.places)
        return dict(zip(named, self.places, strict=True)).get((model, server))

    def leases_of(self, position: Known) -> list[Held]:
        """Return the leases of an endpoint, ordered by fence."""
        name = (position.endpoint.model, position.endpoint.server)
        return sorted((o for o in self.leases if (o.model, o.server) == name), key=_fence)

    def find(self, token: str) -> Held | None:
        """Return the current lease with this token; ``None`` if the token is stale."""
        return next((lease for lease in self.leases if token and lease.token == token), None)

    def of_job(self, model: str, job: str) -> Held | None:
        """Return the lease of a job, or ``None``."""
        return next(
            (lease for lease in self.leases if (lease.model, lease.job) == (model, job)), None
        )

    def room(self, position: Known) -> int:
        """Return how many slots of an endpoint can still be granted within the limit of its server."""
        own = position.endpoint.slots - len(self.leases_of(position))
        server = position.endpoint.server
        together = self.together.get(server)
        if together is None:
            return own
        return min(own, together - sum(lease.server == server for lease in self.leases))

    def gives(self, position: Known) -> bool:
        """Return whether an endpoint may be given jobs."""
        well = position.well or not position.endpoint.reports
        return (
            well
            and not position.draining
            and not position.removed
            and position.rests_until <= self.now
        )

    def expected_info(self, position: Known) -> EndpointInfo:
        """Return the state that the pool must show for an endpoint."""
        states = [item.state for item in self.leases_of(position)]
        over = [
            item for item in self.leases_of(position) if item.job and item.expires_at <= self.now
        ]
        return EndpointInfo(
            endpoint=position.endpoint,
            healthy=position.well or not position.endpoint.reports,
            draining=position.draining,
            removed=position.removed,
            resting_until=position.rests_until if position.rests_until > self.now else None,
            unassigned=states.count(Permit.UNASSIGNED),
            assigned=states.count(Permit.ASSIGNED),
            detached=states.count(Permit.DETACHED),
            overdue=len(over),
            last_model=self.loaded.get(position.endpoint.server),
        )

    def tick(self, now: float) -> None:
        """Set the time, and end expired leases. A lease with a job is kept if its endpoint has ``reports=True``."""
        self.now = now
        for lease in [lease for lease in self.leases if lease.expires_at <= now]:
            position = self.endpoint(lease.model, lease.server)
            if lease.job is None or (position and not position.endpoint.reports):
                self.end(lease, reported=False)

    def end(self, lease: Held, *, reported: bool = True) -> None:
        """End a lease. With ``reported=False``, the holder is not notified, so the lease's note is stored as late."""
        self.leases.remove(lease)
        if not reported and lease.note is not None and lease.job is not None:
            self.put_aside(lease.model, lease.job, lease.note)
        position = self.endpoint(lease.model, lease.server)
        if position is not None:
            self.forget(position)

    def clear(self, position: Known) -> None:
        """End the unassigned leases of an endpoint that may get no more jobs."""
        for lease in self.leases_of(position):
            if lease.job is None:
                self.end(lease)

    def forget(self, position: Known) -> None:
        """Delete an endpoint if it was removed and has no lease."""
        if position.removed and not self.leases_of(position):
            self.places.remove(position)
            server = position.endpoint.server
            if all(item.endpoint.server != server for item in self.places):
                self.together.pop(server, None)
                self.loaded.pop(server, None)

    def put_aside(self, model: str, job: str, note: bytes) -> None:
        """Store a late note for a job; only the last `_LATE` notes of the job are kept."""
        self.late.setdefault((model, job), []).append(note)
        del self.late[model, job][:-_LATE]

    def register(self, endpoint: Endpoint) -> Known:
        """Add an endpoint, or change it."""
        position = self.endpoint(endpoint.model, endpoint.server)
        if position is None:
            position = Known(endpoint)
            self.places.append(position)
        position.endpoint = endpoint
        position.draining = position.removed = False
        self.together[endpoint.server] = endpoint.together
        self.tick(self.now)
        return position

    def acquire(
        self, model: str, holder: str, ttl: float, limit: int, idle: float | None
    ) -> list[Held]:
        """Acquire free slots, then idle slots of other holders if ``idle`` is given."""
        taken: list[Held] = []
        of_model = [item for item in self.places if item.endpoint.model == model]
        while len(taken) < limit:
            able = [item for item in of_model if self.gives(item) and self.room(item) > 0]
            if not able:
                break
            taken.append(self._take(min(able, key=self._merit), holder, ttl))
        if idle is None:
            return taken
        able = [item for item in of_model if self.gives(item) and self.room(item) >= 0]
        others = [item for position in able for item in self.leases_of(position)]
        unused = [
            item for item in others
            if not item.job and item.holder != holder and self.now - item.since > idle
        ]  # fmt: skip
        for lease in sorted(unused, key=_fence)[: limit - len(taken)]:
            position = self.endpoint(lease.model, lease.server)
            self.end(lease)
            if position is not None:
                taken.append(self._take(position, holder, ttl))
        return taken

    def _merit(self, position: Known) -> tuple[int, bool, int, int]:
        here = self.loaded.get(position.endpoint.server) == position.endpoint.model
        used, number = len(self.leases_of(position)), self.places.index(position)
        return (-position.endpoint.priority, not here, used, number)

    def _take(self, position: Known, holder: str, ttl: float) -> Held:
        model, server = position.endpoint.model, position.endpoint.server
        made = Held(model, server, holder, self.now + ttl, self.now)
        made.switched = self.loaded.get(server, model) != model
        made.fence = max((lease.fence for lease in self.leases), default=0) + 1
        self.leases.append(made)
        return made

    def assign(self, shown: SlotLease, job: str, ttl: float) -> tuple[Held | None, bool]:
        """Bind a lease to a job; return the lease, and whether its token is new."""
        lease, had, fresh = self.find(shown.token), self.of_job(shown.model, job), False
        if lease is None:
            lease = had if had is not None and had.via == shown.token else None
        elif lease.job is not None:
            lease = lease if lease is had else None
        elif had is not None:
            self.end(lease)
            had.holder, had.resumed, had.via = lease.holder, True, shown.token
            lease, fresh = had, True
        else:
            lease.job, lease.resumed = job, bool(self.late.get((lease.model, job)))
            lease.switched = self.loaded.get(lease.server, lease.model) != lease.model
            self.loaded[lease.server] = lease.model
        if lease is not None:
            lease.state, lease.expires_at = Permit.ASSIGNED, self.now + ttl
            lease.missed = None
        return lease, fresh

    def detach(self, token: str, ttl: float) -> Held | None:
        """Detach a lease; return ``None`` if the lease is stale or has no job."""
        lease = self.find(token)
        if lease is None or lease.job is None:
            return None
        lease.state, lease.expires_at = Permit.DETACHED, self.now + ttl
        return lease

    def renew(self, shown: SlotLease, ttl: float, *, lost: bool) -> tuple[Held | None, bool]:
        """Renew a lease of this pool or of a ``lost`` pool; return the lease, and whether its token is new."""
        lease, fresh = self.find(shown.token), False
        position = self.endpoint(shown.model, shown.server)
        if lost and shown.job is not None:
            lease = self.of_job(shown.model, shown.job)
            if lease is not None and lease.via != shown.token:
                lease = None
            elif lease is None and position is not None:
                lease, fresh = self._take(position, shown.holder, 0), True
                lease.job, lease.state, lease.via = shown.job, shown.state, shown.token
                lease.switched = shown.switched
                self.loaded[lease.server] = lease.model
        if lease is not None:
            lease.expires_at = max(lease.expires_at, self.now + ttl)
        return lease, fresh

    def release(self, token: str) -> bool:
        """Release a lease; return False for a stale token."""
        lease = self.find(token)
        if lease is not None:
            self.end(lease)
        return lease is not None

    def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        """Leave a note for the holder of a job's lease; the note is late if the token is stale."""
        lease = self.of_job(model, job)
        if lease is None or lease.token != token:
            self.put_aside(model, job, note)
            return Left.LATE
        lease.note = note
        return Left.TAKEN

    def reconcile(self, position: Known, observed: Seen | None, settled: float) -> list[Held]:
        """Record a server's report. End and return the leases whose jobs were missing for ``settled`` seconds."""
        if observed is None:
            return self._silent(position)
        bound = [item for item in self.leases_of(position) if item.job]
        before = position.surplus
        if not (position.well or observed.active <= len(bound)):
            if before is None or observed.active > before[0]:
                position.surplus = (observed.active, self.now)
            elif self.now - before[1] >= settled:
                position.well, position.surplus = True, None
        else:
            position.well, position.surplus = True, None
        missed, ended = self._missed(bound, observed), []
        for lease in bound:
            if lease not in missed:
                lease.missed = None
            elif lease.missed is None or lease.missed[0] != observed.active:
                lease.missed = (observed.active, self.now)
            elif self.now - lease.missed[1] >= settled:
                ended.append(lease)
        for lease in ended:
            self.end(lease, reported=False)
        return ended

    def _silent(self, position: Known) -> list[Held]:
        position.well, position.surplus = False, None
        for lease in self.leases_of(position):
            lease.missed = None
        if position.endpoint.reports:
            self.clear(position)
        return []

    def _missed(self, bound: Sequence[Held], observed: Seen) -> list[Held]:
        if observed.jobs is not None:
            return [item for item in bound if item.job not in observed.jobs]
        if not observed.active:
            return list(bound)
        over = sorted((item for item in bound if item.expires_at <= self.now), key=_end)
        return over[: max(0, len(bound) - observed.active)]


def _fence(lease: Held) -> int:
    return lease.fence


def _end(lease: Held) -> tuple[float, int]:
    return (lease.expires_at, lease.fence)
