"""The slot pool of the Redis backend. The whole pool is in the first partition."""

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
    PoolView,
    Seen,
    SlotLease,
)
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.limits import LIMITS, check_duration, check_label
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.runner import Arg, microseconds, seconds
from taskqueue_redis.slots.records import STATES, granted, lease_of, read_record
from taskqueue_redis.wakeups import RedisRoomSignal, channel_of

_OTHER_POOL = 1
"""answer of the script ``slots_renew`` for a token that an earlier pool has issued"""
_AT_ONCE = 500
"""maximum number of leases that one script call assigns"""


class RedisSlots:
    """Slot pool of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._partition = context.scripts.partitions.names[0]
        self._acquires: set[asyncio.Task[Any]] = set()
        """calls of `acquire` in progress, which continue if their callers are cancelled"""

    async def sent(self) -> None:
        """Wait until all acquires that were already requested have been answered."""
        if self._acquires:
            await asyncio.wait(self._acquires)

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        _, now, reply = await self._run(
            "slots_register", endpoint.model, endpoint.server, endpoint.url, endpoint.slots,
            endpoint.priority, "1" if endpoint.reports else "", endpoint.together or 0,
        )  # fmt: skip
        return read_record(reply, seconds(now)).info

    async def drain(self, model: str, server: str, *, draining: bool = True) -> bool:
        return await self._steer(model, server, "draining", int(draining))

    async def remove(self, model: str, server: str) -> bool:
        return await self._steer(model, server, "removed", 1)

    async def rest(self, model: str, server: str, duration: float) -> bool:
        check_duration("duration", duration)
        return await self._steer(model, server, "rests", microseconds(duration))

    async def _steer(self, model: str, server: str, what: str, value: int) -> bool:
        check_endpoint(model, server)
        return bool(await self._run("slots_steer", model, server, what, value))

    async def configure(self, model: str, document: bytes | None) -> None:
        check_label("model", model)
        check_document(document)
        await self._run("slots_configure", model, document or "")

    async def documents(self) -> dict[str, bytes]:
        self._context.ensure_open()
        reply = await self._context.scripts.run_pages("slots_documents", self._partition)
        return {
            model.decode(): document
            for model, document in zip(reply[::2], reply[1::2], strict=True)
        }

    async def inspect(self, model: str | None = None) -> PoolView:
        if model is not None:
            check_label("model", model)
        seed = secrets.token_hex(32)
        epoch, secret, now, *reply = await self._run("slots_look", model or "", seed)
        records = sorted(
            (read_record(each, seconds(now)) for each in reply),
            key=lambda record: (record.info.endpoint.model, record.number),
        )
        leases = (lease for record in records for lease in record.leases)
        return PoolView(
            epoch=epoch.decode(),
            secret=secret.decode(),
            endpoints=tuple(record.info for record in records),
            leases=tuple(sorted(leases, key=lambda lease: lease.fence)),
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
        args = (
            model,
            holder,
            microseconds(ttl),
            limit,
            "" if idle is None else microseconds(idle),
        )
        asking = asyncio.create_task(self._acquire(args, releasing))
        self._acquires.add(asking)
        asking.add_done_callback(self._acquires.discard)
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._context.background.start(self._release_granted(asking, model, holder))
            raise
        return granted(reply, model, holder)

    async def _acquire(self, args: tuple[Arg, ...], releasing: Sequence[SlotLease]) -> Any:
        seed, tokens = secrets.token_hex(16), _tokens(releasing)
        try:
            return await self._run("slots_acquire", *args, seed, "", *tokens, resend=False)
        except BackendUnavailable as error:
            failure = error.__cause__
            if not (isinstance(failure, Failure) and failure.uncertain):
                raise
        # The answer with the granted slots was lost. A call with the same seed returns the same slots again.
        return await self._run("slots_acquire", *args, seed, "1", *tokens)

    async def _release_granted(self, asking: asyncio.Task[Any], model: str, holder: str) -> None:
        # Errors can be ignored, because leases that are not released will expire.
        with contextlib.suppress(TaskQueueError):
            leases = granted(await asking, model, holder)
            if leases:
                tokens = _tokens(leases)
                await self._context.scripts.run("slots_release", self._partition, *tokens)

    async def assign(
        self, *pairs: tuple[SlotLease, str], ttl: float
    ) -> tuple[SlotLease | None, ...]:
        check_pairs(pairs)
        check_ttl(ttl)
        if not pairs:
            return ()
        assigned: list[SlotLease | None] = []
        for start in range(0, len(pairs), _AT_ONCE):
            leases = [lease for lease, _ in pairs[start : start + _AT_ONCE]]
            args: list[Arg] = []
            for (lease, job), token in zip(pairs[start:], _tokens(leases), strict=False):
                args += token, lease.model, job
            reply = await self._run("slots_assign", microseconds(ttl), *args)
            assigned += _answered(leases, reply)
        return tuple(assigned)

    async def detach(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        return (await self._extend(leases, ttl, "1"))[0]

    async def renew(self, *leases: SlotLease, ttl: float) -> tuple[SlotLease | None, ...]:
        renewed, replies = await self._extend(leases, ttl, "")
        foreign = [
            index
            for index, (lease, reply) in enumerate(zip(leases, replies, strict=True))
            if reply == _OTHER_POOL and check_remade(lease)
        ]
        restored = await self._restore([leases[index] for index in foreign], ttl) if foreign else ()
        answers = dict(zip(foreign, restored, strict=True))
        return tuple(answers.get(index, lease) for index, lease in enumerate(renewed))

    async def _extend(
        self, leases: Sequence[SlotLease], ttl: float, detach: str
    ) -> tuple[tuple[SlotLease | None, ...], list[Any]]:
        """Extend leases. Return the extended leases (None if one cannot be extended), and the script's reply for each.

        ``detach``: "1" to let the jobs continue without their holder, otherwise empty.
        """
        check_leases(leases)
        check_ttl(ttl)
        if not leases:
            return (), []
        reply = await self._run("slots_renew", microseconds(ttl), detach, *_tokens(leases))
        return _answered(leases, reply), reply[1]

    async def _restore(self, leases: list[SlotLease], ttl: float) -> tuple[SlotLease | None, ...]:
        args: list[Arg] = []
        for lease, token in zip(leases, _tokens(leases), strict=True):
            args += token, lease.model, lease.server, lease.holder, lease.job or ""
            args += STATES.index(lease.state), int(lease.switched)
        return _answered(leases, await self._run("slots_restore", microseconds(ttl), *args))

    async def release(self, *leases: SlotLease) -> tuple[bool, ...]:
        check_leases(leases)
        if not leases:
            return ()
        return tuple(map(bool, await self._run("slots_release", *_tokens(leases))))

    async def leave(self, model: str, job: str, token: str, note: bytes) -> Left:
        check_job(model, job)
        check_note(note)
        presented = token if Token.read(token) else ""
        reply = await self._run("slots_leave", model, job, presented, note, secrets.token_hex(8))
        return Left.TAKEN if reply else Left.LATE

    async def late(self, model: str, job: str) -> tuple[bytes, ...]:
        check_job(model, job)
        return tuple(await self._run("slots_late", model, job))

    async def reconcile(
        self, model: str, server: str, observed: Seen | None, *, settled: float
    ) -> tuple[SlotLease, ...]:
        check_endpoint(model, server)
        check_seen(observed, settled)
        active: Arg = "" if observed is None else observed.active
        jobs = () if observed is None else observed.jobs or ()
        which = "1" if observed is not None and observed.jobs is not None else ""
        names = [job.encode(errors="replace") for job in jobs if len(job) <= LIMITS.name]
        # Do not resend, because one report that arrives twice would count as two reports that agree.
        epoch, reply = await self._run(
            "slots_reconcile", model, server, microseconds(settled), active, which, *names,
            resend=False,
        )  # fmt: skip
        leases = []
        for number, fence, _, url, packed in reply:
            place = model, server, url.decode()
            leases.append(lease_of(epoch, place, (number, fence, packed, None), hidden=True))
        return tuple(leases)

    def slot_signal(self, *models: str) -> RedisRoomSignal:
        names = checked_models(models)
        self._context.ensure_open()
        channels = (channel_of(self._partition, "slots", model) for model in names)
        return RedisRoomSignal(self._context.wakeups, tuple(channels))

    async def _run(self, script: str, *args: Arg, resend: bool = True) -> Any:
        self._context.ensure_open()
        return await self._context.scripts.run(script, self._partition, *args, resend=resend)


def _tokens(leases: Sequence[SlotLease]) -> list[str]:
    """Return the tokens of leases; a malformed token is replaced by an empty string."""
    return [lease.token if Token.read(lease.token) else "" for lease in leases]


def _answered(leases: Sequence[SlotLease], reply: Any) -> tuple[SlotLease | None, ...]:
    epoch, answers = reply
    answered: list[SlotLease | None] = []
    for lease, answer in zip(leases, answers, strict=True):
        if isinstance(answer, list):
            number, fence, server, url, packed, note = answer
            place = lease.model, server.decode(), url.decode()
            answered.append(lease_of(epoch, place, (number, fence, packed, note)))
        else:
            answered.append(None)
    return tuple(answered)
