"""The slot pool, all of it in the first partition."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

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
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.limits import LIMITS, check_duration, check_label
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.context import Home
from taskqueue_redis.scripts.keys import slots_channel
from taskqueue_redis.scripts.runner import Word, microseconds, seconds
from taskqueue_redis.slots.records import Place, Shown, granted, lease_of, read_place
from taskqueue_redis.wakeups import RedisRoomBell

__all__ = ["RedisSlots"]

_STATES = (Permit.UNASSIGNED, Permit.ASSIGNED, Permit.DETACHED)
_STRANGE = 1
"""what the script ``slots_renew`` answers where a token is of another pool"""


class RedisSlots:
    """See `taskqueue_core.capabilities.SlotPool`."""

    def __init__(self, home: Home) -> None:
        """Do no input or output."""
        self._home = home
        self._partition = home.scripts.partitions.names[0]

    # endpoints

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        """See `taskqueue_core.capabilities.SlotPool.register`."""
        _, now, told = await self._run(
            "slots_register", endpoint.model, endpoint.server, endpoint.url, endpoint.slots,
            endpoint.priority, "1" if endpoint.reports else "", endpoint.together or 0,
        )  # fmt: skip
        return read_place(told, seconds(now)).info

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        """See `taskqueue_core.capabilities.SlotPool.drain`."""
        return await self._steer(model, server, "draining", int(draining))

    async def remove(self, model: str, server: str) -> bool:
        """See `taskqueue_core.capabilities.SlotPool.remove`."""
        return await self._steer(model, server, "removed", 1)

    async def rest(self, model: str, server: str, duration: float) -> bool:
        """See `taskqueue_core.capabilities.SlotPool.rest`."""
        check_duration("duration", duration)
        return await self._steer(model, server, "rests", microseconds(duration))

    async def _steer(self, model: str, server: str, what: str, value: int) -> bool:
        check_endpoint(model, server)
        return bool(await self._run("slots_steer", model, server, what, value))

    async def configure(self, model: str, document: bytes | None) -> None:
        """See `taskqueue_core.capabilities.SlotPool.configure`."""
        check_label("model", model)
        check_document(document)
        await self._run("slots_configure", model, document or "")

    async def documents(self) -> dict[str, bytes]:
        """See `taskqueue_core.capabilities.SlotPool.documents`."""
        told = await self._run("slots_documents")
        return {
            model.decode(): document for model, document in zip(told[::2], told[1::2], strict=True)
        }

    async def look(self, model: str | None = None) -> PoolView:
        """See `taskqueue_core.capabilities.SlotPool.look`."""
        if model is not None:
            check_label("model", model)
        epoch, now, *told = await self._run("slots_look", model or "")
        places = sorted((read_place(each, seconds(now)) for each in told), key=_by_model)
        leases = (lease for place in places for lease in place.leases)
        return PoolView(
            epoch=epoch.decode(),
            endpoints=tuple(place.info for place in places),
            leases=tuple(sorted(leases, key=_by_fence)),
        )

    # leases

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
        """See `taskqueue_core.capabilities.SlotPool.acquire`."""
        check_acquire(model, holder, limit, releasing, idle)
        check_ttl(ttl)
        words = (
            model,
            holder,
            microseconds(ttl),
            limit,
            "" if idle is None else microseconds(idle),
        )
        asking = asyncio.create_task(self._acquire(words, releasing))
        self._home.asking.add(asking)
        asking.add_done_callback(self._home.asking.discard)
        try:
            told = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._home.background.start(self._give_back(asking, model, holder))
            raise
        return granted(told, model, holder)

    async def _acquire(self, words: tuple[Word, ...], releasing: Sequence[SlotLease]) -> Any:
        seed, tokens = secrets.token_hex(16), _tokens(releasing)
        try:
            return await self._run("slots_acquire", *words, seed, "", *tokens, resend=False)
        except BackendUnavailable as error:
            failure = error.__cause__
            if not (isinstance(failure, Failure) and failure.uncertain):
                raise
        # What was given then has not come here: this finds it again.
        return await self._run("slots_acquire", *words, seed, "1", *tokens)

    async def _give_back(self, asking: asyncio.Task[Any], model: str, holder: str) -> None:
        # What fails here comes back by its time.
        with contextlib.suppress(TaskQueueError, Failure):
            leases = granted(await asking, model, holder)
            if leases:
                tokens = _tokens(leases)
                await self._home.scripts.run("slots_release", self._partition, *tokens)

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        """See `taskqueue_core.capabilities.SlotPool.assign`."""
        check_pairs(pairs)
        check_ttl(ttl)
        if not pairs:
            return ()
        words: list[Word] = []
        for (lease, job), token in zip(pairs, _tokens([lease for lease, _ in pairs]), strict=True):
            words += token, lease.model, job
        told = await self._run("slots_assign", microseconds(ttl), *words)
        return _answered([lease for lease, _ in pairs], told)

    async def detach(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """See `taskqueue_core.capabilities.SlotPool.detach`."""
        check_leases(leases)
        check_ttl(ttl)
        if not leases:
            return ()
        told = await self._run("slots_renew", microseconds(ttl), "1", *_tokens(leases))
        return _answered(leases, told)

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        """See `taskqueue_core.capabilities.SlotPool.renew`."""
        check_leases(leases)
        check_ttl(ttl)
        if not leases:
            return ()
        told = await self._run("slots_renew", microseconds(ttl), "", *_tokens(leases))
        kept = list(_answered(leases, told))
        strange = [
            place
            for place, (lease, answer) in enumerate(zip(leases, told[1], strict=True))
            if answer == _STRANGE and check_remade(lease)
        ]
        if strange:
            for place, lease in zip(
                strange, await self._restore([leases[place] for place in strange], ttl), strict=True
            ):
                kept[place] = lease
        return tuple(kept)

    async def _restore(self, leases: list[SlotLease], ttl: float) -> tuple[SlotLease | None, ...]:
        words: list[Word] = []
        for lease, token in zip(leases, _tokens(leases), strict=True):
            words += token, lease.model, lease.server, lease.holder, lease.job or ""
            words += _STATES.index(lease.state), int(lease.switched)
        return _answered(leases, await self._run("slots_restore", microseconds(ttl), *words))

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        """See `taskqueue_core.capabilities.SlotPool.release`."""
        check_leases(leases)
        if not leases:
            return ()
        return tuple(map(bool, await self._run("slots_release", *_tokens(leases))))

    # what servers say

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        """See `taskqueue_core.capabilities.SlotPool.leave`."""
        check_job(model, job)
        check_note(note)
        presented = token if Token.read(token) else ""
        told = await self._run("slots_leave", model, job, presented, note, secrets.token_hex(8))
        return Left.TAKEN if told else Left.LATE

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        """See `taskqueue_core.capabilities.SlotPool.late`."""
        check_job(model, job)
        return tuple(await self._run("slots_late", model, job))

    async def reconcile(
        self, model: str, server: str, seen: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        """See `taskqueue_core.capabilities.SlotPool.reconcile`."""
        check_endpoint(model, server)
        check_seen(seen, settled)
        active: Word = "" if seen is None else seen.active
        jobs = () if seen is None else seen.jobs or ()
        which = "1" if seen is not None and seen.jobs is not None else ""
        names = [job.encode(errors="replace") for job in jobs if len(job) <= LIMITS.name]
        # The same observation twice would be two that agree, so it is not sent again.
        epoch, told = await self._run(
            "slots_reconcile", model, server, microseconds(settled), active, which, *names,
            resend=False,
        )  # fmt: skip
        leases = []
        for number, fence, _, url, packed in told:
            place = Place(model, server, url.decode())
            leases.append(lease_of(epoch, place, (number, fence, packed, None), hidden=True))
        return tuple(leases)

    def bell(self, *models: str) -> RedisRoomBell:
        """See `taskqueue_core.capabilities.SlotPool.bell`."""
        names = checked_models(models)
        self._home.demand_open()
        channels = (slots_channel(self._partition, model) for model in names)
        return RedisRoomBell(self._home.wakeups, tuple(channels))

    async def _run(self, script: str, *words: Word, resend: bool = True) -> Any:
        self._home.demand_open()
        with translated():
            return await self._home.scripts.run(script, self._partition, *words, resend=resend)


def _tokens(leases: Sequence[SlotLease]) -> list[str]:
    """Return the tokens, empty where one is none."""
    return [lease.token if Token.read(lease.token) else "" for lease in leases]


def _answered(leases: Sequence[SlotLease], told: Any) -> tuple[SlotLease | None, ...]:
    epoch, answers = told
    return tuple(
        _answer(epoch, lease, answer) for lease, answer in zip(leases, answers, strict=True)
    )


def _answer(epoch: bytes, lease: SlotLease, answer: Any) -> SlotLease | None:
    if not isinstance(answer, list):
        return None
    number, fence, server, url, packed, note = answer
    place = Place(lease.model, server.decode(), url.decode())
    return lease_of(epoch, place, (number, fence, packed, note))


def _by_model(place: Shown) -> tuple[str, int]:
    return place.info.endpoint.model, place.number


def _by_fence(lease: SlotLease) -> int:
    return lease.fence
