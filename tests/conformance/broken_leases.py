# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Slot pools that each break one promise about who owns a slot, when it is free again, or who is notified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Left, Permit, PoolView, Seen, SlotLease
from taskqueue_memory.room_signal import MemoryRoomSignal, RoomNotifier
from taskqueue_memory.slots.leases import Lease
from tests.conformance.facade import Facade, FacadeSlots


class ReleasesByName(FacadeSlots):
    """Defect: a release frees a slot of the endpoint without checking the token."""

    def of_place(self, shown: SlotLease) -> Lease | None:
        """Return any lease of the endpoint, whatever its token."""
        place = self.pool.position(shown.model, shown.server)
        return next(iter(place.leases.values()), None) if place else None

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        there = [self.of_place(lease) for lease in leases]
        found = tuple(lease.to_slot_lease() if lease else leases[0] for lease in there)
        return await self.inner.release(*found)


class RenewsTheStale(FacadeSlots):
    """Defect: a renewal succeeds even if the lease is stale."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = await self.inner.renew(*leases, ttl=ttl)
        return tuple(one or shown for one, shown in zip(kept, leases, strict=True))


class RenewalShortens(FacadeSlots):
    """Defect: a renewal can make the remaining time of a lease shorter."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = await self.inner.renew(*leases, ttl=ttl)
        for lease in filter(None, kept):
            self.pool.expire_at(self.pool.leases[lease.token], self.facade.now() + ttl)
        found = [one and self.pool.leases[one.token].to_slot_lease() for one in kept]
        return tuple(one if isinstance(one, SlotLease) else None for one in found)


class EndsByArithmetic(FacadeSlots):
    """Defect: a lease with a job ends when its time is over, even if its server still runs the job."""

    async def inspect(self, model: str | None = None) -> PoolView:
        now = self.facade.now()
        for lease in tuple(self.pool.leases.values()):
            if lease.expires_at <= now:
                self.pool.end(lease)
        return await self.inner.inspect(model)


class LeaksAfterRelease(FacadeSlots):
    """Defect: releasing the slot of a job does not free it."""

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        there = [self.pool.leases.get(lease.token) for lease in leases]
        gone = [lease.to_slot_lease() for lease in there if lease is not None and lease.job is None]
        await self.inner.release(*gone)
        return tuple(lease is not None for lease in there)


class TakeoverForgets(FacadeSlots):
    """Defect: assigning a job that already has a slot gives it a second slot."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        for _, job in pairs:
            had = next((o for o in self.pool.leases.values() if o.job == job), None)
            if had is not None and had.token not in {lease.token for lease, _ in pairs}:
                self.pool.jobs.pop((had.position.endpoint.model, job), None)
        return await self.inner.assign(*pairs, ttl=ttl)


class TakeoverLeaks(FacadeSlots):
    """Defect: if a job keeps its former slot, the slot offered for it now is not freed."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        bound = await self.inner.assign(*pairs, ttl=ttl)
        for (shown, _), lease in zip(pairs, bound, strict=True):
            if lease is not None and lease.resumed:
                place = self.pool.models[shown.model][shown.server]
                self.pool.grant(place, "unknown", self.facade.now(), ttl)
        return bound


class TakeoverSharesTheSlot(FacadeSlots):
    """Defect: the former holder of a job's slot can still use its lease after a takeover."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        before = {lease.job: token for token, lease in self.pool.leases.items()}
        bound = await self.inner.assign(*pairs, ttl=ttl)
        for lease in bound:
            if lease is not None and lease.resumed:
                self.pool.leases[before[lease.job]] = self.pool.leases[lease.token]
        return bound


class TakeoverForgetsNotes(FacadeSlots):
    """Defect: a takeover does not pass on the note left for the former holder."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        bound = await self.inner.assign(*pairs, ttl=ttl)
        return tuple(one and structs.replace(one, note=None) for one in bound)


class LosesThePool(FacadeSlots):
    """Defect: leases of a pool that was lost are not restored."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        epoch = self.pool.epoch
        known = [one if one.token.startswith(epoch) else _without_tenant(one) for one in leases]
        return await self.inner.renew(*known, ttl=ttl)


class RemakesAnything(FacadeSlots):
    """Defect: any token of a pool that was lost is restored as a lease."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = list(await self.inner.renew(*leases, ttl=ttl))
        for number, lease in enumerate(leases):
            place = self.pool.position(lease.model, lease.server)
            if kept[number] is None and place and not lease.token.startswith(self.pool.epoch):
                made = self.pool.grant(place, lease.holder, self.facade.now(), ttl)
                kept[number] = made.to_slot_lease()
        return tuple(kept)


class ClearsAtOnce(FacadeSlots):
    """Defect: a single report of an idle server ends the leases of its jobs."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        first = await self.inner.reconcile(model, server, seen, settled=settled)
        return first + await self.inner.reconcile(model, server, seen, settled=0)


class IgnoresSpacing(FacadeSlots):
    """Defect: two reports of an idle server end a lease, however short the time between them."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        del settled
        return await self.inner.reconcile(model, server, seen, settled=0)


class ForgetsTheContrary(FacadeSlots):
    """Defect: a job missing in one report counts as missing even if a later report showed it running."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        place = self.pool.position(model, server)
        marks = {o.token: o.missed for o in place.with_job} if place else {}
        ended = await self.inner.reconcile(model, server, seen, settled=settled)
        for token, missed in marks.items():
            if token in self.pool.leases and missed:
                self.pool.leases[token].missed = missed
        return ended


class ClearsTheFresh(FacadeSlots):
    """Defect: a missing job is remembered for the server, so that it counts against the next lease of the slot too."""

    marks: dict[str, tuple[int, float]]

    def __init__(self, inner: Any, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.marks = {}

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        place = self.pool.position(model, server)
        for lease in place.with_job if place else ():
            lease.missed = self.marks.get(server)
        ended = await self.inner.reconcile(model, server, seen, settled=settled)
        if seen and not seen.active:
            self.marks.setdefault(server, (0, self.facade.now()))
        return ended


class ClearsTheUnassigned(FacadeSlots):
    """Defect: a report of an idle server also ends leases to which no job is assigned yet."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        ended = await self.inner.reconcile(model, server, seen, settled=settled)
        place = self.pool.position(model, server)
        if place and seen and not seen.active:
            for lease in tuple(place.leases.values()):
                if lease.state is Permit.UNASSIGNED:
                    self.pool.end(lease)
        return ended


class NeverReconciles(FacadeSlots):
    """Defect: reports of a server change its health, but never end a lease."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        await self.inner.reconcile(model, server, seen, settled=settled)
        for lease in self.pool.leases.values():
            lease.missed = None
        return ()


class ClearsThoseInTime(FacadeSlots):
    """Defect: if a server runs fewer jobs than it has leases, leases end before their time is over."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        place = self.pool.position(model, server)
        until = {o.token: o.expires_at for o in place.with_job} if place else {}
        for token, end in until.items():
            self.pool.leases[token].expires_at = min(end, self.facade.now())
        ended = await self.inner.reconcile(model, server, seen, settled=settled)
        for token in until.keys() & self.pool.leases.keys():
            self.pool.leases[token].expires_at = until[token]
        return ended


class LateNotesOverwrite(FacadeSlots):
    """Defect: a note with a stale token replaces the note of the current holder."""

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        left = await self.inner.leave(model, job, token, note)
        if left is Left.LATE and (model, job) in self.pool.jobs:
            self.pool.jobs[model, job].note = note
        return left


class HoardsLateNotes(FacadeSlots):
    """Defect: late notes are kept for ever."""

    notes: dict[tuple[str, str], list[bytes]]

    def __init__(self, inner: Any, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.notes = {}

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        left = await self.inner.leave(model, job, token, note)
        if left is Left.LATE:
            self.notes.setdefault((model, job), []).append(note)
        return left

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        return tuple(self.notes.get((model, job), ()))


class NeverRingsForSlots(FacadeSlots):
    """Defect: a slot signal is never sent."""

    def slot_signal(self, *models: str) -> MemoryRoomSignal:
        return MemoryRoomSignal(RoomNotifier(self.facade.clock), models)


class ShowsTokens(FacadeSlots):
    """Defect: listing the leases of a pool shows their secret tokens."""

    async def inspect(self, model: str | None = None) -> PoolView:
        view = await self.inner.inspect(model)
        tokens = {lease.fence: token for token, lease in self.pool.leases.items()}
        leases: Sequence[SlotLease] = [
            structs.replace(o, token=tokens[o.fence]) for o in view.leases
        ]
        return structs.replace(view, leases=tuple(leases))


def _without_tenant(lease: SlotLease) -> SlotLease:
    return structs.replace(lease, token="")
