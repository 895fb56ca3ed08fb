"""The operations of the Redis backend for operators: settings, statistics, maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from taskqueue_core.authoring.helpers import (
    checked_progress,
    checked_settings,
    demand_unused,
    workers_of,
)
from taskqueue_core.capabilities import DeletedQueue, Durability, Maintained, Order, QueueSettings
from taskqueue_core.errors import BackendUnavailable, InvalidInput, SettingsConflict
from taskqueue_core.limits import check_name, check_time
from taskqueue_core.tasks import (
    Delivery,
    Expired,
    Ledger,
    QueueStats,
    TaskStatus,
    WorkerInfo,
)
from taskqueue_redis.connection.errors import QueueReset
from taskqueue_redis.connection.failures import ScriptError
from taskqueue_redis.context import RedisContext
from taskqueue_redis.script_calls import AT_ONCE, ScriptCaller
from taskqueue_redis.scripts.coalescer import Coalescer
from taskqueue_redis.scripts.receipts import parse_receipt
from taskqueue_redis.scripts.runner import microseconds, seconds
from taskqueue_redis.scripts.task_record import (
    ledger_of,
    limits_of,
    number_in,
    pairs,
    settings_in,
    status_of,
    weights_of,
)

_CHUNK = 500
_SOON = 0.5
"""seconds until the next maintenance pass after maintenance has caught up, because the load probably continues"""
_QUEUES = 50
"""maximum number of queues whose statistics one script call reads"""
_SET = "set them again (their version is that of the settings that are returned)"
_log = logging.getLogger("taskqueue.redis")


class _Consumer(msgspec.Struct):
    consumer: str
    since: float
    keys: tuple[str, ...] = ()
    in_flight: int = 0


class RedisControl(ScriptCaller):
    """Control operations of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        super().__init__(context)
        self._reads: Coalescer[str, Any] = Coalescer(self._read_stats)
        self._anomalies: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._unclaimed: dict[str, list[bytes]] = {}
        """by partition, the queues that the last check found without a consumer"""

    async def queues(self) -> tuple[str, ...]:
        names: set[str] = set()
        for partition in self._context.scripts.partitions.names:
            for kind in ("queues", "subs"):
                keys = await self._pages("queues", partition, kind)
                names.update(key.decode() for key in keys)
        return tuple(sorted(names))

    async def settings(self, key: str) -> QueueSettings:
        settings, version = await self._stored_settings(key)
        if settings is None:
            _log.error("the settings of queue %s are lost: %s", key, _SET)
        return settings or QueueSettings(version=version)

    async def _stored_settings(self, key: str) -> tuple[QueueSettings | None, int]:
        """Return the settings of a queue, ``None`` if they and their copy are damaged, and their version."""
        fields = pairs((await self._stats_of(key))[0])
        return settings_in(fields), number_in(fields, "version")

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        check_name("key", key)
        durabilities = await self._context.checks.durabilities(settings.replicas)
        checked_settings(
            settings, durabilities,
            journal=True, flow=True, fair_order=True, floor_share=True, fan_out=True, listing=True,
        )  # fmt: skip
        partition_of = self._context.scripts.partitions.of
        if any(partition_of(other) != partition_of(key) for other in settings.bound_to):
            raise InvalidInput(
                "bound_to", "a queue in another partition", "a queue in the same partition"
            )
        replicated = settings.durability is Durability.REPLICATED
        changed = settings.model_copy(update={"version": settings.version + 1})
        reply = await self._of(
            "configure",
            key,
            settings.version,
            changed.model_dump_json(),
            microseconds(changed.dedupe_window),
            microseconds(changed.result_ttl),
            changed.max_losses,
            "1" if changed.journal else "",
            changed.durability or "",
            changed.replicas if replicated else 0,
            changed.moved_to or "",
            msgspec.json.encode(changed.bound_to) if changed.bound_to else "",
            weights_of(changed),
            "\0".join(("", *changed.index, "")) if changed.index else "",
            microseconds(changed.keep_ended),
            changed.keep_ended_most,
            *limits_of(changed),
        )
        if reply != b"ok":
            raise SettingsConflict(
                f"version {reply.decode()} of the settings is in force, not {settings.version}: read them again"
            )
        remaining, cursor = (1, b"0") if changed.order is Order.FAIR else (0, b"")
        while remaining or cursor:  # sort the waiting tasks by tenant
            remaining, cursor = await self._of("sort", key, AT_ONCE, cursor)
        return changed

    async def ledger(self, key: str) -> Ledger:
        return ledger_of(pairs((await self._stats_of(key))[0]))

    async def _stats_of(self, key: str) -> Any:
        """Return what the script ``stats`` answers for a queue. Calls at the same time share calls of the script.

        A damaged queue makes the script fail, so that each queue of such a call is then read by itself.
        """
        partition = self._context.scripts.partitions.of(key)
        try:
            (answer,) = await self._reads.submit(partition, (key,))
        except QueueReset:
            raise
        except BackendUnavailable as error:
            if not isinstance(error.__cause__, ScriptError):
                raise
            (answer,) = await self._read_stats(partition, (key,))
        return answer

    async def _read_stats(self, partition: str, keys: Sequence[str]) -> list[Any]:
        self._context.ensure_open()
        # The statistics and the settings of a queue are often asked for together.
        some = tuple(dict.fromkeys(keys))
        items = [(key,) for key in some]
        found = await self._context.scripts.run_each("stats", partition, (), items, _QUEUES)
        by_key = dict(zip(some, found, strict=True))
        return [by_key[key] for key in keys]

    async def stats(self, key: str) -> QueueStats:
        await self._context.wakeups.join_all()
        reply, oldest, subscribers = await self._stats_of(key)
        counters = pairs(reply)
        return QueueStats(
            key=key,
            ledger=ledger_of(counters),
            oldest_waiting=seconds(oldest) if oldest else None,
            delivered=number_in(counters, "delivered"),
            redelivered=number_in(counters, "redelivered"),
            retried=number_in(counters, "retried"),
            lost=number_in(counters, "lost"),
            subscribers=int(subscribers),
            blocked_on_dead=number_in(counters, "blocked_on_dead"),
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        reply = await self._of_each("status", key, task_ids)
        return tuple(
            status_of(key, task_id, answer) for task_id, answer in zip(task_ids, reply, strict=True)
        )

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        return tuple(await self._of_each("result", key, task_ids))

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        progress = checked_progress(value)
        if isinstance(progress, str):
            progress = progress.encode(errors="replace").decode()
        receipt = parse_receipt(delivery.receipt)
        if receipt is None or receipt.key != delivery.task.key:
            return False
        place = receipt.key, delivery.task.id, receipt.fence, receipt.token
        texts = msgspec.msgpack.encode(progress), msgspec.json.encode(progress)
        return bool(await self._of("progress", *place, *texts))

    async def cancel(self, key: str, task_id: str) -> bool:
        return bool(await self._of("cancel", key, task_id))

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        check_time("at", at)
        return bool(await self._of("reschedule", key, task_id, microseconds(at)))

    async def purge(self, key: str) -> int:
        return await self._of_all("purge", key)

    async def delete(self, key: str) -> DeletedQueue:
        deleted, forgotten, over = False, 0, False
        while not over:
            known, number, over, uses = await self._of(
                "delete", key, _CHUNK, QueueSettings().model_dump_json()
            )
            waiting, scheduled, running, dead, consumers, blocked = map(int, uses)
            demand_unused(
                key,
                waiting=waiting,
                scheduled=scheduled,
                running=running,
                dead=dead,
                consumers=consumers,
                blocked=blocked,
            )
            deleted, forgotten = deleted or bool(known), forgotten + number
        return DeletedQueue(deleted=deleted, forgotten=forgotten)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        await self._context.wakeups.join_all()
        consumers: dict[bytes, _Consumer] = {}
        for partition in self._context.scripts.partitions.names:
            tokens = [(token,) for token in set(await self._pages("workers", partition, ""))]
            for token, name, since, keys, in_flight in await self._context.scripts.run_each(
                "workers", partition, ("of",), tokens
            ):
                if name is None:
                    continue  # it has left since
                consumer = consumers.setdefault(token, _Consumer(name.decode(), seconds(since)))
                consumer.since = min(consumer.since, seconds(since))
                consumer.keys += tuple(key.decode() for key in keys)
                consumer.in_flight += in_flight
        return workers_of(consumers.values())

    async def maintain(self) -> Maintained:
        promoted = forgotten = recovered = removed = 0
        expired: list[Expired] = []
        unclaimed: set[str] = set()
        behind, took = list[float](), list[float]()
        settings = self._context.settings
        names = self._context.scripts.partitions.names
        stale = round(1000 * settings.stale_consumers)
        lease, period = microseconds(settings.lease), microseconds(settings.housekeeping)
        args = lease, period, _CHUNK, stale, self._context.process_id
        passes = (self._run("maintain", name, *args) for name in names)
        start = time.monotonic()
        outcomes = await asyncio.gather(*passes, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            # Ignore an unavailable partition unless all are unavailable: maintenance has run in the other partitions.
            if not isinstance(failure, BackendUnavailable) or len(failures) == len(names):
                raise failure
        for partition, reply in zip(names, outcomes, strict=True):
            if isinstance(reply, BaseException):
                continue
            (
                due,
                late,
                over,
                taken_back,
                anomalies,
                given_up,
                remaining,
                steps,
                step,
                left,
                own,
                damaged,
                idle,
            ) = reply
            promoted += due
            expired += [Expired(key.decode(), task_id.decode(), n) for key, task_id, n in late]
            forgotten += over
            recovered += taken_back
            removed += idle
            self._report(partition, int(anomalies), given_up)
            self._report_steps(partition, int(steps), seconds(step))
            await self._report_damage(partition, damaged)
            if remaining != b"":  # not every pass checks
                self._unclaimed[partition] = remaining
            unclaimed.update(key.decode() for key in self._unclaimed.get(partition, ()))
            behind += [seconds(left)] if left else []
            took += [seconds(own)] if own else []
        again_in = _SOON if took else None
        # The next pass begins when the store was free of maintenance for three times as long as it has worked. The time
        # that has passed here and on the network counts as free.
        if any(took):
            again_in = max(0.0, 4 * sum(took) - (time.monotonic() - start))
        return Maintained(
            promoted=promoted,
            expired=tuple(expired),
            forgotten=forgotten,
            recovered=recovered,
            removed=removed,
            unclaimed=tuple(sorted(unclaimed)),
            behind=max(behind, default=None),
            again_in=again_in,
        )

    def _report(self, partition: str, anomalies: int, given_up: list[list[bytes]]) -> None:
        for _, worker in given_up:
            _log.warning(
                "worker %s stopped responding; its deliveries were taken back", worker.decode()
            )
        if anomalies > self._anomalies.get(partition, 0):
            self._anomalies[partition] = anomalies
            _log.error(
                "partition %s: inconsistent entries repaired so far: %d", partition, anomalies
            )

    def _report_steps(self, partition: str, steps: int, last: float) -> None:
        if steps > self._steps.get(partition, 0):
            self._steps[partition] = steps
            _log.warning(
                "partition %s: the clock of Redis was set back by %.1f s; the store's time continues "
                "(steps so far: %d)", partition, last, steps,
            )  # fmt: skip

    async def _apply_again(self, key: str) -> None:
        """Store the settings of a queue again. A failure is logged only, because maintenance must continue."""
        try:
            settings, _ = await self._stored_settings(key)
            if settings is not None:
                await self.configure(key, settings)
            else:
                _log.error("the settings of queue %s are lost: %s", key, _SET)
        except SettingsConflict:
            pass  # another process applies them
        except Exception:  # noqa: BLE001 - a report of damage must not end maintenance
            _log.exception("could not reapply the settings of queue %s", key)

    async def _report_damage(self, partition: str, damaged: list[bytes]) -> None:
        for key, _, task_id in (name.decode(errors="replace").partition(" ") for name in damaged):
            if key == "/":
                _log.error(
                    "partition %s: the key %s had a wrong type or length; it was renamed to aside:%s",
                    partition,
                    task_id,
                    task_id,
                )
            elif key == "/schedule":
                _log.error("partition %s: schedule %s was damaged", partition, task_id)
            elif task_id == "/":
                _log.error(
                    "partition %s: the counters or limits of queue %s were damaged", partition, key
                )
                await self._apply_again(key)
            else:
                _log.error("partition %s: task %s of %s was damaged", partition, task_id, key)
