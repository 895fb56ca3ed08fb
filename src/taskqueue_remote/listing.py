"""The lists of tasks of a server's backend, read over HTTP."""

from __future__ import annotations

import msgspec
from typing_extensions import Unpack

from taskqueue_core.authoring.listings import Filters, Query, check_cursor, checked_page
from taskqueue_core.capabilities import Erasure, TaskDetail, TaskPage
from taskqueue_core.protocol.frames import WireTask, to_task
from taskqueue_core.server_address import path
from taskqueue_core.tasks import Failure, TaskStatus
from taskqueue_remote.client import HttpClient
from taskqueue_remote.problems import problem_of


class _Detail(msgspec.Struct, frozen=True, kw_only=True):
    published_at: float | None = None
    delivered_at: float | None = None
    worker_id: str | None = None
    history: tuple[Failure, ...] = ()
    task: WireTask


class _Detailed(TaskStatus, frozen=True, kw_only=True):
    detail: _Detail


class RemoteListing:
    """The lists of the server's backend. A token without the right ``admin`` sees no payloads and no headers."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        asked = Query(key=key, **filters)
        if after is not None:
            check_cursor(after)
        newest = "true" if asked.newest else None
        given = {"state": asked.state, "tenant": asked.tenant, "tag": asked.tag}
        given |= {"worker": asked.worker, "after": after, "newest": newest}
        for name, time in {"since": asked.since, "until": asked.until}.items():
            given[name] = None if time is None else f"{time:.9f}"
        query: dict[str, str | int] = {
            name: text for name, text in given.items() if text is not None
        }
        query["limit"] = checked_page(limit)
        return await self._client.ask("GET", path("queues", key, "tasks"), TaskPage, query=query)

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        answer = await self._client.fetch(
            "GET", path("tasks", key, task_id), query={"detail": "true"}
        )
        if not answer.ok:
            if problem_of(answer.status, answer.body).code == "unknown_task":
                return None
            raise self._client.error(answer)
        found = self._client.decode(answer.body, _Detailed)
        fields = msgspec.structs.asdict(found)
        detail = msgspec.structs.asdict(fields.pop("detail"))
        task = to_task(detail.pop("task"))
        return TaskDetail(status=TaskStatus(**fields), task=task, **detail)

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        Query(key=key, tag=tag)
        body = {"tag": tag, "limit": checked_page(limit)}
        return await self._client.ask("POST", path("queues", key, "erase"), Erasure, body=body)
