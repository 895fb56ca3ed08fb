"""The slot pool of the memory backend. Each operation runs without an ``await`` and is therefore atomic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from taskqueue_core.authoring.slot_checks import (
    Token,
    check_acquire,
    check_document,
    check_endpoint,
    check_job,
    check_leases,
    check_note,
    check_pairs,
    check_remade,
    check_seen,
    check_ttl,
    checked_models,
)
from taskqueue_core.capabilities import (
    Endpoint,
    EndpointInfo,
    Left,
    Permit,
    PoolView,
    Seen,
    SlotLease,
)
from taskqueue_core.clock import Clock
from taskqueue_core.limits import check_duration, check_label
from taskqueue_memory.room_signal import MemoryRoomSignal
from taskqueue_memory.slots.leases import Lease, SlotPosition
from taskqueue_memory.slots.transitions import Pool


class MemorySlots:
    """Slot pool of the memory backend."""

    def __init__(self, clock: Clock) -> None:
        self._pool = Pool(clock)
        self._documents: dict[str, bytes] = {}

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        now = self._begin()
        position = self._pool.put(endpoint)
        # If the endpoint no longer reports its jobs, end the leases that were kept after their expiry.
        self._pool.sweep(now)
        self._pool.notify((position,), now)
        return position.info(now)

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        return self._steer(model, server, clear=draining, draining=draining)

    async def remove(self, model: str, server: str) -> bool:
        return self._steer(model, server, clear=True, removed=True)

    async def rest(self, model: str, server: str, duration: float) -> bool:
        check_duration("duration", duration)
        until = self._pool.clock.now() + duration if duration else -math.inf
        return self._steer(model, server, clear=bool(duration), rests_until=until)

    def _steer(self, model: str, server: str, *, clear: bool, **state: bool | float) -> bool:
        """Set attributes of an endpoint; if ``clear``, end its leases without a job. Return False if it is unknown."""
        check_endpoint(model, server)
        now = self._begin()
        position = self._pool.position(model, server)
        if position is None:
            return False
        if clear:
            self._pool.clear(position)
        for name, value in state.items():
            setattr(position, name, value)
        self._pool.forget_if_done(position)
        self._pool.notify((position,), now)
        return True

    async def configure(self, model: str, document: bytes | None) -> None:
        check_label("model", model)
        check_document(document)
        if document is None:
            self._documents.pop(model, None)
        else:
            self._documents[model] = document

    async def documents(self) -> dict[str, bytes]:
        return dict(self._documents)

    async def inspect(self, model: str | None = None) -> PoolView:
        if model is not None:
            check_label("model", model)
        now = self._begin()
        models = sorted(self._pool.models) if model is None else [model]
        positions = [p for name in models for p in self._pool.models.get(name, {}).values()]
        leases = [lease for position in positions for lease in position.leases.values()]
        return PoolView(
            epoch=self._pool.epoch,
            secret=self._pool.secret,
            endpoints=tuple(position.info(now) for position in positions),
            leases=tuple(lease.shown() for lease in sorted(leases, key=attrgetter("fence"))),
        )

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
        check_acquire(model, holder, limit, releasing, idle)
        check_ttl(ttl)
        now = self._begin()
        freed = [result.position for lease in releasing if (result := self._release(lease, now))]
        taken: list[Lease] = []
        while len(taken) < limit and (position := self._best(model, now)) is not None:
            taken.append(self._pool.grant(position, holder, now, ttl))
        if idle is not None:
            for lease in self._idle(model, holder, now - idle)[: limit - len(taken)]:
                self._pool.end(lease)
                taken.append(self._pool.grant(lease.position, holder, now, ttl))
        self._pool.notify(freed, now)
        return tuple(lease.to_slot_lease() for lease in taken)

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        check_pairs(pairs)
        check_ttl(ttl)
        now = self._begin()
        answers: list[SlotLease | None] = []
        for shown, job in pairs:
            lease = self._assign(shown, job, now)
            if lease is not None:
                lease.state, lease.missed = Permit.ASSIGNED, None
                self._pool.expire_at(lease, now + ttl)
            answers.append(lease.to_slot_lease() if lease else None)
        return tuple(answers)

    async def detach(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        check_leases(leases)
        check_ttl(ttl)
        now = self._begin()
        matches = [self._pool.find(lease.token, now) for lease in leases]
        bound = [lease if lease and lease.job is not None else None for lease in matches]
        for lease in filter(None, bound):
            lease.state = Permit.DETACHED
            self._pool.expire_at(lease, now + ttl)
        return tuple(lease.to_slot_lease() if lease else None for lease in bound)

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        check_leases(leases)
        check_ttl(ttl)
        now = self._begin()
        matches = [self._pool.find(lease.token, now) for lease in leases]
        retained = [
            lease or self._remade(shown, now) for shown, lease in zip(leases, matches, strict=True)
        ]
        for lease in filter(None, retained):
            self._pool.expire_at(lease, max(lease.expires_at, now + ttl))
        return tuple(lease.to_slot_lease() if lease else None for lease in retained)

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        check_leases(leases)
        now = self._begin()
        ended = [self._release(lease, now) for lease in leases]
        self._pool.notify([lease.position for lease in ended if lease], now)
        return tuple(lease is not None for lease in ended)

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        check_job(model, job)
        check_note(note)
        now = self._begin()
        lease = self._pool.of_job(model, job, now)
        if lease is None or lease.token != token:
            self._pool.late.add(model, job, note, now)
            return Left.LATE
        lease.note = note
        self._pool.signals.notify(model)
        return Left.TAKEN

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        check_job(model, job)
        return self._pool.late.of(model, job, self._begin())

    async def reconcile(
        self, model: str, server: str, observed: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        check_endpoint(model, server)
        check_seen(observed, settled)
        now = self._begin()
        position = self._pool.position(model, server)
        if position is None:
            return ()
        if observed is None:
            # While the server did not answer, its jobs may have changed, so earlier reports no longer count.
            position.well, position.surplus = False, None
            for lease in position.leases.values():
                lease.missed = None
            if not position.healthy:
                self._pool.clear(position)
            self._pool.notify((position,), now)
            return ()
        _apply_health(position, observed, settled, now)
        ended = []
        missing = _missing(position, observed, now)
        for lease in position.with_job:
            if lease not in missing:
                lease.missed = None
            elif lease.missed is None or lease.missed[0] != observed.active:
                lease.missed = (observed.active, now)
            elif now - lease.missed[1] >= settled:
                ended.append(lease.shown())
                self._pool.end_untold(lease, now)
        self._pool.notify((position,), now)
        return tuple(ended)

    def slot_signal(self, *models: str) -> MemoryRoomSignal:
        return MemoryRoomSignal(self._pool.signals, checked_models(models))

    def _begin(self) -> float:
        now = self._pool.clock.now()
        self._pool.sweep(now)
        return now

    def _best(self, model: str, now: float) -> SlotPosition | None:
        """Return the endpoint whose slot is granted next; None if no slot is free."""
        positions = self._pool.models.get(model, {}).values()
        able = [position for position in positions if position.may_give(now) and position.room > 0]
        return min(able, key=lambda position: position.merit(), default=None)

    def _idle(self, model: str, holder: str, before: float) -> list[Lease]:
        """Return the leases without a job that other holders acquired before the time ``before``, the oldest first."""
        positions = self._pool.models.get(model, {}).values()
        now = self._pool.clock.now()
        able = [position for position in positions if position.may_give(now) and position.room >= 0]
        leases = [lease for position in able for lease in position.leases.values()]
        idle = [
            lease
            for lease in leases
            if lease.job is None and lease.holder != holder and lease.since < before
        ]
        return sorted(idle, key=attrgetter("fence"))

    def _assign(self, shown: SlotLease, job: str, now: float) -> Lease | None:
        lease = self._pool.find(shown.token, now)
        model = shown.model if lease is None else lease.position.endpoint.model
        had = self._pool.of_job(model, job, now)
        if lease is None:
            return had if had is not None and had.via == shown.token else None
        if lease.job is not None:
            return lease if lease is had else None
        if had is None:
            self._pool.bind(lease, job)
            lease.resumed = bool(self._pool.late.of(model, job, now))
            return lease
        self._pool.end(lease)
        self._pool.notify((lease.position,), now)
        self._pool.renumber(had, shown.token)
        had.holder, had.resumed = lease.holder, True
        return had

    def _remade(self, shown: SlotLease, now: float) -> Lease | None:
        """Recreate a lease that an earlier instance of the pool granted; return None if that is not possible."""
        token = Token.read(shown.token)
        if token is None or token.epoch == self._pool.epoch or not check_remade(shown):
            return None
        job = shown.job or ""
        had = self._pool.of_job(shown.model, job, now)
        if had is not None:
            return had if had.via == shown.token else None
        position = self._pool.position(shown.model, shown.server)
        if position is None:
            return None
        lease = self._pool.grant(position, shown.holder, now, ttl=0.0)
        self._pool.bind(lease, job)
        lease.state, lease.via, lease.switched = shown.state, shown.token, shown.switched
        return lease

    def _release(self, shown: SlotLease, now: float) -> Lease | None:
        lease = self._pool.find(shown.token, now)
        if lease is not None:
            self._pool.end(lease)
        return lease


def _apply_health(position: SlotPosition, observed: Seen, settled: float, now: float) -> None:
    before = position.surplus
    if position.well or observed.active <= len(position.with_job):
        position.well, position.surplus = True, None
    elif before is None or observed.active > before[0]:
        position.surplus = (observed.active, now)
    elif now - before[1] >= settled:
        position.well, position.surplus = True, None


def _missing(position: SlotPosition, observed: Seen, now: float) -> set[Lease]:
    """Return the leases whose jobs the server is apparently not running."""
    bound = position.with_job
    if observed.jobs is not None:
        return {lease for lease in bound if lease.job not in observed.jobs}
    if not observed.active:
        return set(bound)
    expired = (lease for lease in bound if lease.expires_at <= now)
    over = sorted(expired, key=attrgetter("expires_at"))
    return set(over[: max(0, len(bound) - observed.active)])
