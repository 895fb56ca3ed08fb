"""The schedules of a server's backend, used over HTTP. The server publishes their tasks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NoReturn

import msgspec

from taskqueue_core.capabilities import Due, Fire, Outcome, RoomSignal, StoredSchedule
from taskqueue_core.errors import CapabilityMissing, TaskQueueError, UnknownKey
from taskqueue_core.limits import LIMITS
from taskqueue_core.schedules import Cron, Overlap, Schedule, Spec, TaskTemplate
from taskqueue_core.server_address import path
from taskqueue_core.tasks import Confirmation
from taskqueue_remote.client import Answer, HttpClient
from taskqueue_remote.problems import problem_of

_UNKNOWN = "unknown_schedule"


class _When(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["cron", "every"]
    expression: str | None = None
    timezone: str | None = None
    seconds: float | None = None
    since: float | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    when: _When
    call: TaskTemplate
    catch_up: Literal["none", "last", "all"]
    late: float
    overlap: Overlap
    jitter: float
    starts: float | None
    ends: float | None
    paused: bool

    @classmethod
    def of(cls, schedule: Schedule) -> _Body:
        given = schedule.when
        if isinstance(given, Cron):
            when = _When(type="cron", expression=given.expression, timezone=given.timezone)
        else:
            when = _When(type="every", seconds=given.seconds, since=_seconds(given.since))
        return cls(
            when=when,
            call=schedule.task,
            starts=_seconds(schedule.starts),
            ends=_seconds(schedule.ends),
            **{name: getattr(schedule, name) for name in _SAME},
        )


_SAME = ("catch_up", "late", "overlap", "jitter", "paused")


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    key: str
    schedule: dict[str, Any] | None
    next_at: float | None
    paused: bool
    version: int
    declared_by: str | None
    recent: tuple[Outcome, ...]
    refused: Outcome | None = None

    def stored(self) -> StoredSchedule:
        """Return the schedule as the store keeps it, without checks: this machine may lack its time zone."""
        if self.schedule is None:
            spec: dict[str, Any] = {"v": "a schedule that the server cannot read"}
        else:
            body = {"name": self.name, **self.schedule, "when": {**self.schedule["when"]}}
            for part, field in ((body, "starts"), (body, "ends"), (body["when"], "since")):
                part[field] = _moment(part.get(field))
            paused = None if self.paused is self.schedule["paused"] else self.paused
            spec = {"schedule": body, "declared_by": self.declared_by, "paused": paused}
        return StoredSchedule(
            key=self.key,
            name=self.name,
            spec=msgspec.json.encode(spec),
            next_at=self.next_at,
            version=self.version,
            recent=self.recent,
            refused=self.refused,
        )


class _Page(msgspec.Struct, frozen=True):
    schedules: list[_Status]
    next: str | None = None


class _Deleted(msgspec.Struct, frozen=True):
    deleted: bool


class _Runs(msgspec.Struct, frozen=True):
    confirmations: tuple[Confirmation, ...]


class RemoteSchedules:
    """The schedules of the server's backend. Each call sends HTTP requests."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def put(
        self,
        schedule: StoredSchedule,
        *,
        version: int | None = None,
        keep_next: bool = False,  # noqa: ARG002 - the server decides this itself
    ) -> StoredSchedule:
        """Store a schedule. The server computes its next instant, and a pause or resume is a request of its own."""
        target = path("schedules", schedule.name)
        spec = Spec.decode(schedule.spec)
        body = {
            "schedule": _Body.of(spec.schedule),
            "version": version,
            "declared_by": spec.declared_by,
        }
        return (await self._client.ask("PUT", target, _Status, body=body)).stored()

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        answer = await self._client.fetch("GET", path("schedules", name))
        if problem_of(answer.status, answer.body).code == _UNKNOWN:
            return None
        if not answer.ok:
            raise self._client.error(answer)
        found = self._client.decode(answer.body, _Status).stored()
        return found if key in (None, found.key) else None

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        found: tuple[StoredSchedule, ...] = ()
        while len(found) < limit:  # a page has fewer schedules if they are large
            query: dict[str, str | int] = {"limit": min(limit - len(found), LIMITS.batch)}
            if after is not None:
                query["after"] = after
            page = await self._client.ask("GET", "/v1/schedules", _Page, query=query)
            found += tuple(status.stored() for status in page.schedules)
            if page.next is None or not page.schedules:
                break
            after = page.next
        return found

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:  # noqa: ARG002 - see `Schedules`
        query: dict[str, str | int] = {} if version is None else {"version": version}
        target = path("schedules", name)
        return (await self._client.ask("DELETE", target, _Deleted, query=query)).deleted

    async def set_paused(self, name: str, *, paused: bool) -> StoredSchedule:
        """Pause or resume a schedule."""
        target = path("schedules", name, "pause" if paused else "resume")
        answer = await self._client.fetch("POST", target)
        if not answer.ok:
            raise self._error(answer)
        return self._client.decode(answer.body, _Status).stored()

    async def run_schedule(
        self, name: str, since: float | None, until: float | None, overlap: Overlap | None
    ) -> tuple[Confirmation, ...]:
        body = {"since": since, "until": until, "overlap": overlap}
        answer = await self._client.post_once(
            path("schedules", name, "run"), msgspec.json.encode(body)
        )
        if not answer.ok:
            raise self._error(answer)
        return self._client.decode(answer.body, _Runs).confirmations

    def _error(self, answer: Answer) -> TaskQueueError:
        if problem_of(answer.status, answer.body).code == _UNKNOWN:
            return UnknownKey("name", "a schedule that does not exist", "the name of a schedule")
        return self._client.error(answer)

    async def due(self, limit: int) -> Due:  # noqa: ARG002 - the signature of `Schedules`
        """Return nothing, because the server fires the schedules."""
        return Due(now=self._client.clock.now())

    async def fire(self, *fires: Fire) -> NoReturn:  # noqa: ARG002 - the signature of `Schedules`
        """Raise `CapabilityMissing`, because the server fires the schedules."""
        raise CapabilityMissing("the server fires the schedules: use trigger or backfill")

    def signal(self) -> RoomSignal:
        """Raise `CapabilityMissing`, because the server fires the schedules."""
        raise CapabilityMissing("the server fires the schedules")


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)
