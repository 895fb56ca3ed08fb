# ruff: noqa: D102 - each method stands for the one of the backend that it breaks
"""Backends that break one promise each about whose a slot is, when it is free again, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Left, Permit, PoolView, Seen, SlotLease
from taskqueue_memory.room_signal import MemoryRoomSignal, RoomNotifier
from taskqueue_memory.slots.leases import Lease
from tests.conformance.facade import Facade, FacadeSlots

# Whose a slot is


class ReleasesByName(FacadeSlots):
    """Who knows an endpoint may give its slot back: the token is not looked at."""

    def of_place(self, shown: SlotLease) -> Lease | None:
        """Return any lease of the endpoint, by whatever token."""
        place = self.pool.position(shown.model, shown.server)
        return next(iter(place.leases.values()), None) if place else None

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        there = [self.of_place(lease) for lease in leases]
        found = tuple(lease.to_slot_lease() if lease else leases[0] for lease in there)
        return await self.inner.release(*found)


class RenewsTheStale(FacadeSlots):
    """A renewal always says yes."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = await self.inner.renew(*leases, ttl=ttl)
        return tuple(one or shown for one, shown in zip(kept, leases, strict=True))


class RenewalShortens(FacadeSlots):
    """A renewal sets the time, also to less."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = await self.inner.renew(*leases, ttl=ttl)
        for lease in filter(None, kept):
            self.pool.expire_at(self.pool.leases[lease.token], self.facade.now() + ttl)
        found = [one and self.pool.leases[one.token].to_slot_lease() for one in kept]
        return tuple(one if isinstance(one, SlotLease) else None for one in found)


class EndsByArithmetic(FacadeSlots):
    """A lease with a job ends by its time, whatever its server runs."""

    async def inspect(self, model: str | None = None) -> PoolView:
        now = self.facade.now()
        for lease in tuple(self.pool.leases.values()):
            if lease.expires_at <= now:
                self.pool.end(lease)
        return await self.inner.inspect(model)


class LeaksAfterRelease(FacadeSlots):
    """The slot of a job that was given back stays held."""

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        there = [self.pool.leases.get(lease.token) for lease in leases]
        gone = [lease.to_slot_lease() for lease in there if lease is not None and lease.job is None]
        await self.inner.release(*gone)
        return tuple(lease is not None for lease in there)


class TakeoverForgets(FacadeSlots):
    """A job that has a slot gets another one."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        for _, job in pairs:
            had = next((o for o in self.pool.leases.values() if o.job == job), None)
            if had is not None and had.token not in {lease.token for lease, _ in pairs}:
                self.pool.jobs.pop((had.position.endpoint.model, job), None)
        return await self.inner.assign(*pairs, ttl=ttl)


class TakeoverLeaks(FacadeSlots):
    """The slot that a job came with, and does not need, stays held."""

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
    """Who had a job's slot before has it still."""

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
    """A note that was left for the holder before is not told to the next one."""

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        bound = await self.inner.assign(*pairs, ttl=ttl)
        return tuple(one and structs.replace(one, note=None) for one in bound)


class LosesThePool(FacadeSlots):
    """What was lost with the pool is not made again."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        epoch = self.pool.epoch
        known = [one if one.token.startswith(epoch) else _without_tenant(one) for one in leases]
        return await self.inner.renew(*known, ttl=ttl)


class RemakesAnything(FacadeSlots):
    """Every token of a pool that is no more is worth a slot."""

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        kept = list(await self.inner.renew(*leases, ttl=ttl))
        for number, lease in enumerate(leases):
            place = self.pool.position(lease.model, lease.server)
            if kept[number] is None and place and not lease.token.startswith(self.pool.epoch):
                made = self.pool.grant(place, lease.holder, self.facade.now(), ttl)
                kept[number] = made.to_slot_lease()
        return tuple(kept)


# What servers say


class ClearsAtOnce(FacadeSlots):
    """One look at an idle server ends its leases."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        first = await self.inner.reconcile(model, server, seen, settled=settled)
        return first + await self.inner.reconcile(model, server, seen, settled=0)


class IgnoresSpacing(FacadeSlots):
    """Two looks end a lease, however close to each other."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        del settled
        return await self.inner.reconcile(model, server, seen, settled=0)


class ForgetsTheContrary(FacadeSlots):
    """What was missed once stays missed, though it was seen after."""

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
    """What was missed is noted for the slot, not for the lease on it."""

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
    """A server that runs nothing frees the slots that wait for a job, too."""

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
    """What a server says of its health counts, and nothing else."""

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        await self.inner.reconcile(model, server, seen, settled=settled)
        for lease in self.pool.leases.values():
            lease.missed = None
        return ()


class ClearsThoseInTime(FacadeSlots):
    """Where less runs than is held, leases end that have not run out."""

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
    """A note with a stale token takes the place of the good one."""

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        left = await self.inner.leave(model, job, token, note)
        if left is Left.LATE and (model, job) in self.pool.jobs:
            self.pool.jobs[model, job].note = note
        return left


class HoardsLateNotes(FacadeSlots):
    """Late notes are kept for ever."""

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


# Who is told


class NeverRingsForSlots(FacadeSlots):
    """A bell that nobody rings."""

    def slot_signal(self, *models: str) -> MemoryRoomSignal:
        return MemoryRoomSignal(RoomNotifier(self.facade.clock), models)


class ShowsTokens(FacadeSlots):
    """Who looks at the pool is shown the tokens of others."""

    async def inspect(self, model: str | None = None) -> PoolView:
        view = await self.inner.inspect(model)
        tokens = {lease.fence: token for token, lease in self.pool.leases.items()}
        leases: Sequence[SlotLease] = [
            structs.replace(o, token=tokens[o.fence]) for o in view.leases
        ]
        return structs.replace(view, leases=tuple(leases))


def _without_tenant(lease: SlotLease) -> SlotLease:
    return structs.replace(lease, token="")
