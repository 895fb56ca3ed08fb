"""What a pool of slots must answer, written as plainly as can be: everything is looked for in one list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Left, Permit, Seen, SlotLease

__all__ = ["Held", "Known", "SlotModel"]

_LATE = 8


@dataclass(eq=False)
class Known:
    """An endpoint."""

    endpoint: Endpoint
    well: bool = False
    surplus: tuple[int, float] | None = None
    draining: bool = False
    removed: bool = False
    rests_until: float = 0.0


@dataclass(eq=False)
class Held:
    """A lease. Its token is what the backend says."""

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
    """A pool, and what each call makes of it. Time is set from outside."""

    now: float = 0.0
    places: list[Known] = field(default_factory=list)
    leases: list[Held] = field(default_factory=list)
    together: dict[str, int | None] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    late: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)

    # what there is

    def place(self, model: str, server: str) -> Known | None:
        """Return an endpoint."""
        named = ((p.endpoint.model, p.endpoint.server) for p in self.places)
        return dict(zip(named, self.places, strict=True)).get((model, server))

    def of_place(self, place: Known) -> list[Held]:
        """Return the leases of an endpoint, by fence."""
        name = (place.endpoint.model, place.endpoint.server)
        return sorted((o for o in self.leases if (o.model, o.server) == name), key=_fence)

    def find(self, token: str) -> Held | None:
        """Return the lease of a good token."""
        return next((one for one in self.leases if token and one.token == token), None)

    def of_job(self, model: str, job: str) -> Held | None:
        """Return the lease that a job has."""
        return next((one for one in self.leases if (one.model, one.job) == (model, job)), None)

    def room(self, place: Known) -> int:
        """Return how many slots of an endpoint are free, for itself and for its server."""
        own = place.endpoint.slots - len(self.of_place(place))
        server = place.endpoint.server
        together = self.together.get(server)
        if together is None:
            return own
        return min(own, together - sum(one.server == server for one in self.leases))

    def gives(self, place: Known) -> bool:
        """Whether an endpoint may get jobs."""
        well = place.well or not place.endpoint.reports
        return well and not place.draining and not place.removed and place.rests_until <= self.now

    def told(self, place: Known) -> EndpointInfo:
        """Return an endpoint as it must be told."""
        states = [one.state for one in self.of_place(place)]
        over = [one for one in self.of_place(place) if one.job and one.expires_at <= self.now]
        return EndpointInfo(
            endpoint=place.endpoint,
            healthy=place.well or not place.endpoint.reports,
            draining=place.draining,
            removed=place.removed,
            resting_until=place.rests_until if place.rests_until > self.now else None,
            unassigned=states.count(Permit.UNASSIGNED),
            assigned=states.count(Permit.ASSIGNED),
            detached=states.count(Permit.DETACHED),
            overdue=len(over),
            last_model=self.loaded.get(place.endpoint.server),
        )

    # what is done

    def tick(self, now: float) -> None:
        """Let time end what it ends."""
        self.now = now
        for lease in [one for one in self.leases if one.expires_at <= now]:
            place = self.place(lease.model, lease.server)
            if lease.job is None or (place and not place.endpoint.reports):
                self.end(lease, told=False)

    def end(self, lease: Held, *, told: bool = True) -> None:
        """End a lease; a note that its holder was not ``told`` is late."""
        self.leases.remove(lease)
        if not told and lease.note is not None and lease.job is not None:
            self.put_aside(lease.model, lease.job, lease.note)
        place = self.place(lease.model, lease.server)
        if place is not None:
            self.forget(place)

    def clear(self, place: Known) -> None:
        """End what has no job, for the endpoint may get none."""
        for lease in self.of_place(place):
            if lease.job is None:
                self.end(lease)

    def forget(self, place: Known) -> None:
        """Forget an endpoint that was removed and holds nothing."""
        if place.removed and not self.of_place(place):
            self.places.remove(place)
            server = place.endpoint.server
            if all(one.endpoint.server != server for one in self.places):
                self.together.pop(server, None)
                self.loaded.pop(server, None)

    def put_aside(self, model: str, job: str, note: bytes) -> None:
        """Keep a late note."""
        self.late.setdefault((model, job), []).append(note)
        del self.late[model, job][:-_LATE]

    def register(self, endpoint: Endpoint) -> Known:
        """Add an endpoint, or change it."""
        place = self.place(endpoint.model, endpoint.server)
        if place is None:
            place = Known(endpoint)
            self.places.append(place)
        place.endpoint = endpoint
        place.draining = place.removed = False
        self.together[endpoint.server] = endpoint.together
        self.tick(self.now)
        return place

    def acquire(
        self, model: str, holder: str, ttl: float, limit: int, idle: float | None
    ) -> list[Held]:
        """Take slots."""
        taken: list[Held] = []
        of_model = [one for one in self.places if one.endpoint.model == model]
        while len(taken) < limit:
            able = [one for one in of_model if self.gives(one) and self.room(one) > 0]
            if not able:
                break
            taken.append(self._take(min(able, key=self._merit), holder, ttl))
        if idle is None:
            return taken
        able = [one for one in of_model if self.gives(one) and self.room(one) >= 0]
        others = [one for place in able for one in self.of_place(place)]
        unused = [
            one for one in others
            if not one.job and one.holder != holder and self.now - one.since > idle
        ]  # fmt: skip
        for lease in sorted(unused, key=_fence)[: limit - len(taken)]:
            place = self.place(lease.model, lease.server)
            self.end(lease)
            if place is not None:
                taken.append(self._take(place, holder, ttl))
        return taken

    def _merit(self, place: Known) -> tuple[int, bool, int, int]:
        here = self.loaded.get(place.endpoint.server) == place.endpoint.model
        used, number = len(self.of_place(place)), self.places.index(place)
        return (-place.endpoint.priority, not here, used, number)

    def _take(self, place: Known, holder: str, ttl: float) -> Held:
        model, server = place.endpoint.model, place.endpoint.server
        made = Held(model, server, holder, self.now + ttl, self.now)
        made.switched = self.loaded.get(server, model) != model
        made.fence = max((one.fence for one in self.leases), default=0) + 1
        self.leases.append(made)
        return made

    def assign(self, shown: SlotLease, job: str, ttl: float) -> tuple[Held | None, bool]:
        """Bind a lease to a job; say whether its token is a new one."""
        lease, had, fresh = self.find(shown.token), self.of_job(shown.model, job), False
        if lease is None:
            lease = had if had is not None and had.via == shown.token else None
        elif lease.job is not None:
            lease = lease if lease is had else None
        elif had is not None:
            self.end(lease)
            had.holder, had.resumed, had.via = lease.holder, True, shown.token
            had.missed, lease, fresh = None, had, True
        else:
            lease.job = job
            lease.switched = self.loaded.get(lease.server, lease.model) != lease.model
            self.loaded[lease.server] = lease.model
        if lease is not None:
            lease.state, lease.expires_at = Permit.ASSIGNED, self.now + ttl
        return lease, fresh

    def detach(self, token: str, ttl: float) -> Held | None:
        """Detach a lease."""
        lease = self.find(token)
        if lease is None or lease.job is None:
            return None
        lease.state, lease.expires_at = Permit.DETACHED, self.now + ttl
        return lease

    def renew(self, shown: SlotLease, ttl: float, *, lost: bool) -> tuple[Held | None, bool]:
        """Renew a lease, of a ``lost`` pool or of this one; say whether its token is a new one."""
        lease, fresh = self.find(shown.token), False
        place = self.place(shown.model, shown.server)
        if lost and shown.job is not None:
            lease = self.of_job(shown.model, shown.job)
            if lease is not None and lease.via != shown.token:
                lease = None
            elif lease is None and place is not None:
                lease, fresh = self._take(place, shown.holder, 0), True
                lease.job, lease.state, lease.via = shown.job, shown.state, shown.token
                lease.switched = shown.switched
                self.loaded[lease.server] = lease.model
        if lease is not None:
            lease.expires_at = max(lease.expires_at, self.now + ttl)
        return lease, fresh

    def release(self, token: str) -> bool:
        """Release a lease."""
        lease = self.find(token)
        if lease is not None:
            self.end(lease)
        return lease is not None

    def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        """Leave a note."""
        lease = self.of_job(model, job)
        if lease is None or lease.token != token:
            self.put_aside(model, job, note)
            return Left.LATE
        lease.note = note
        return Left.TAKEN

    def reconcile(self, place: Known, seen: Seen | None, settled: float) -> list[Held]:
        """Hold leases against what was seen; return those that end."""
        if seen is None:
            return self._silent(place)
        bound = [one for one in self.of_place(place) if one.job]
        before = place.surplus
        if not (place.well or seen.active <= len(bound)):
            if before is None or seen.active > before[0]:
                place.surplus = (seen.active, self.now)
            elif self.now - before[1] >= settled:
                place.well, place.surplus = True, None
        else:
            place.well, place.surplus = True, None
        missed, ended = self._missed(bound, seen), []
        for lease in bound:
            if lease not in missed:
                lease.missed = None
            elif lease.missed is None or lease.missed[0] != seen.active:
                lease.missed = (seen.active, self.now)
            elif self.now - lease.missed[1] >= settled:
                ended.append(lease)
        for lease in ended:
            self.end(lease, told=False)
        return ended

    def _silent(self, place: Known) -> list[Held]:
        place.well = False
        if place.endpoint.reports:
            self.clear(place)
        return []

    def _missed(self, bound: Sequence[Held], seen: Seen) -> list[Held]:
        if seen.jobs is not None:
            return [one for one in bound if one.job not in seen.jobs]
        if not seen.active:
            return list(bound)
        over = sorted((one for one in bound if one.expires_at <= self.now), key=_end)
        return over[: max(0, len(bound) - seen.active)]


def _fence(lease: Held) -> int:
    return lease.fence


def _end(lease: Held) -> tuple[float, int]:
    return (lease.expires_at, lease.fence)
