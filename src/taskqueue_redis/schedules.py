"""The schedules of the Redis backend: each is in the partition of its queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec import structs

from taskqueue_core.authoring.schedule_steps import check_fires, check_schedule_limit
from taskqueue_core.capabilities import Due, Fire, Fired, Outcome, StoredSchedule
from taskqueue_core.capabilities.schedules import RECENT
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed, SettingsConflict
from taskqueue_core.limits import check_name
from taskqueue_redis.connection.failures import AnswerLost, Refused
from taskqueue_redis.context import RedisContext
from taskqueue_redis.publisher import confirmation_of, store_full, task_args
from taskqueue_redis.scripts.coalescer import split
from taskqueue_redis.scripts.runner import Arg, microseconds, seconds
from taskqueue_redis.wakeups import RedisRoomSignal, channel_of

_AT_ONCE = 250
"""maximum number of schedules per script call, and of the tasks of one schedule"""
_LEAST = 16 * 1024
"""number of bytes that a task counts at least, so that a script call has few of them"""


class RedisSchedules:
    """Schedules of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._scripts = context.scripts

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        self._context.ensure_open()
        key = schedule.key
        stored = await self._scripts.run_replicated(
            "schedule_put", self._scripts.partitions.of(key), (key,),
            key, schedule.name, "" if version is None else version, "1" if keep_next else "",
            _optional(schedule.next_at), schedule.spec, "\n".join(map(_line, schedule.recent)),
        )  # fmt: skip
        if len(stored) == 1:
            raise SettingsConflict(
                f"the schedule has version {int(stored[0])}, not {version}: "
                "read it again, and repeat the change"
            )
        set_version, next_at, outcomes, refused = stored
        record = b"%b:%b:%b\n%b" % (set_version, next_at, refused, outcomes)
        return _schedule(f"{schedule.name} {key}".encode(), record, schedule.spec)

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        check_name("name", name)
        if key is not None:
            check_name("key", key)
            member = f"[{name} {key}"
            found = await self._listed([self._scripts.partitions.of(key)], member, member, 1)
        else:
            found = await self._listed(self._scripts.partitions.names, f"[{name} ", f"({name}!", 1)
        return min(
            (schedule for page in found for schedule in page),
            key=lambda schedule: schedule.key,
            default=None,
        )

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        check_schedule_limit(limit)
        if after is not None:
            check_name("after", after)
        first = "-" if after is None else f"[{after}!"
        pages = await self._listed(self._scripts.partitions.names, first, "+", limit)
        found = sorted(
            chain.from_iterable(pages), key=lambda schedule: (schedule.name, schedule.key)
        )
        return tuple(found[:limit])

    async def _listed(
        self, partitions: Iterable[str], first: str, last: str, limit: int
    ) -> Sequence[Sequence[StoredSchedule]]:
        self._context.ensure_open()
        return await gather_all(
            self._list_of(partition, first, last, limit) for partition in partitions
        )

    async def _list_of(
        self, partition: str, first: str, last: str, limit: int
    ) -> Sequence[StoredSchedule]:
        """List schedules of one partition. A script call may return fewer if they are large."""
        found: tuple[StoredSchedule, ...] = ()
        while len(found) < limit:
            reply = await self._scripts.run("schedules", partition, first, last, limit - len(found))
            if not reply:
                break
            found += _schedules(reply)
            first = f"({found[-1].name} {found[-1].key}"
        return found

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        check_name("key", key)
        check_name("name", name)
        self._context.ensure_open()
        answer = await self._scripts.run(
            "schedule_delete", self._scripts.partitions.of(key), key, name,
            "" if version is None else version,
        )  # fmt: skip
        if isinstance(answer, bytes):
            raise SettingsConflict(
                f"the schedule has version {int(answer)}, not {version}: "
                "read it again, and repeat the change"
            )
        return bool(answer)

    async def due(self, limit: int) -> Due:
        check_schedule_limit(limit)
        self._context.ensure_open()
        replies = await gather_all(
            self._scripts.run("schedule_due", partition, limit)
            for partition in self._scripts.partitions.names
        )
        times = [seconds(next_at) for _, next_at, *_ in replies if next_at]
        due = [schedule for _, _, *reply in replies for schedule in _schedules(reply)]
        due.sort(key=lambda schedule: schedule.next_at or 0.0)
        now = min(seconds(time) for time, *_ in replies)
        return Due(now=now, schedules=tuple(due), next_at=min(times, default=None))

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        check_fires(fires)
        self._context.ensure_open()
        if not self._scripts.promises_checked:
            await self._scripts.check_promises()
        indexes: dict[str, list[int]] = {}
        for index, fire in enumerate(fires):
            indexes.setdefault(self._scripts.partitions.of(fire.key), []).append(index)
        answers = await gather_all(
            self._fire(partition, [fires[index] for index in batch])
            for partition, batch in indexes.items()
        )
        done: dict[int, Fired] = {}
        for batch, fired in zip(indexes.values(), answers, strict=True):
            done.update(zip(batch, fired, strict=True))
        return tuple(done[index] for index in range(len(fires)))

    async def _fire(self, partition: str, fires: Sequence[Fire]) -> Sequence[Fired]:
        """Fire the schedules of a partition. A script call may leave some of them to the next one."""
        done: tuple[Fired, ...] = ()
        while len(done) < len(fires):
            some = next(split([_part(fire) for fire in fires[len(done) :]], _AT_ONCE, _size))
            done += await self._run(partition, some)
        return done

    async def _run(self, partition: str, fires: Sequence[Fire]) -> tuple[Fired, ...]:
        args = [arg for fire in fires for arg in _fire_args(fire)]
        try:
            reply = await self._scripts.run_replicated(
                "schedule_fire", partition, {fire.key for fire in fires}, *args
            )
        except BackendUnavailable as error:
            match error.__cause__:
                case AnswerLost() as lost:
                    raise PublishUnconfirmed(str(error)) from lost
                case Refused(why="OOM") if all(fire.runs for fire in fires):
                    full = [store_full(fire.runs[0].task) for fire in fires]
                    return tuple([Fired(confirmations=(confirmation,)) for confirmation in full])
            raise
        return tuple([_fired(*pair) for pair in zip(fires, reply, strict=False)])

    def signal(self) -> RedisRoomSignal:
        self._context.ensure_open()
        partitions = self._scripts.partitions.names
        channels = tuple(channel_of(partition, "schedules", "") for partition in partitions)
        return RedisRoomSignal(self._context.wakeups, channels)


def _fired(fire: Fire, answers: int | Sequence[int | bytes]) -> Fired:
    if isinstance(answers, int):
        return Fired(stale=True)
    pairs = zip(fire.runs, answers, strict=False)
    return Fired(confirmations=tuple([confirmation_of(run.task, each) for run, each in pairs]))


def _size(fire: Fire) -> int:
    return sum(max(len(run.task.payload), _LEAST) for run in fire.runs)


def _part(fire: Fire) -> Fire:
    """Return a fire with as many tasks as one script call may publish: the schedule continues with the next one."""
    if len(fire.runs) <= 1:
        return fire
    some = next(split(fire.runs, _AT_ONCE, lambda run: len(run.task.payload)))
    if len(some) == len(fire.runs):
        return fire
    return structs.replace(fire, runs=tuple(some), next_at=fire.runs[len(some)].instant)


def _fire_args(fire: Fire) -> list[Arg]:
    skips = [f"{microseconds(s.instant)} {s.count} {s.reason}" for s in fire.skipped[-RECENT:]]
    args: list[Arg] = [
        fire.key, fire.name, fire.version, _optional(fire.planned_for), _optional(fire.next_at),
        "\n".join(skips), len(fire.runs),
        " ".join(str(microseconds(run.instant)) for run in fire.runs),
    ]  # fmt: skip
    for run in fire.runs:
        args += task_args((run.task,))
    return args


def _optional(time: float | None) -> int | str:
    return "" if time is None else microseconds(time)


def _schedules(reply: Sequence[bytes]) -> tuple[StoredSchedule, ...]:
    return tuple([_schedule(*reply[start : start + 3]) for start in range(0, len(reply), 3)])


def _schedule(field: bytes, record: bytes, spec: bytes) -> StoredSchedule:
    name, _, key = field.decode().partition(" ")
    head, _, lines = record.partition(b"\n")
    version, next_at, *refused = head.split(b":", 2)
    return StoredSchedule(
        key=key,
        name=name,
        spec=spec,
        next_at=seconds(next_at) if next_at else None,
        version=int(version),
        recent=tuple([_outcome(line) for line in lines.decode().splitlines()]),
        refused=_outcome(refused[0].decode()) if refused and refused[0] else None,
    )


def _line(outcome: Outcome) -> str:
    instant, at = microseconds(outcome.instant), microseconds(outcome.at)
    return f"{instant} {at} {outcome.count} {outcome.task_id or '-'} {outcome.result}"


def _outcome(line: str) -> Outcome:
    instant, at, count, task_id, result = line.split(" ", 4)
    return Outcome(
        instant=seconds(instant),
        at=seconds(at),
        task_id=None if task_id == "-" else task_id,
        result=result,
        count=int(count),
    )
