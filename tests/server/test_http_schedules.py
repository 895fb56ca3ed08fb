"""Schedules over HTTP, and through the backend named ``server``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from taskqueue_core import Cron, Every, Queue, Schedule, Tasks, TaskTemplate
from taskqueue_core.capabilities import StoredSchedule, schedules_of
from taskqueue_core.consumer.firing import fire_due
from taskqueue_core.errors import (
    ConfigurationError,
    InvalidInput,
    QueueFull,
    SettingsConflict,
    UnknownKey,
)
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.tasks import Published
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from tests.server.access import ADMIN, ALL, A, B, bearer, entry, everybody, write
from tests.server.support import Running, http, problem, running

BODY: dict[str, Any] = {
    "schedule": {
        "when": {"type": "cron", "expression": "0 9 * * MON-FRI", "timezone": "Europe/Berlin"},
        "call": {"key": "mail", "payload": {"to": "ada"}},
    }
}
DIGEST = Schedule("digest", Cron("@daily"), TaskTemplate.of("mail", {"to": "ada"}))
URL = "/v1/schedules/digest"


@asynccontextmanager
async def remote(tmp_path: Path) -> AsyncIterator[tuple[Queue, MemoryBackend]]:
    """Open a queue on a server that requires a token, and the backend of the server."""
    backend = MemoryBackend()
    async with running(backend, tokens_file=everybody(tmp_path / "tokens.toml")) as it:
        client = RemoteBackend(it.server.url, ADMIN)
        yield Queue(InstrumentedBackend(client, Hooks())), backend
        await client.aclose()


def changed(**fields: Any) -> dict[str, Any]:
    """Return the body with other fields of the schedule; a dot separates the names of nested fields."""
    body: dict[str, Any] = {"schedule": {name: {**part} for name, part in BODY["schedule"].items()}}
    for name, value in fields.items():
        *parents, last = name.split("__")
        target = body["schedule"]
        for parent in parents:
            target = target[parent]
        target[last] = value
    return body


async def test_put_get_list_and_delete() -> None:
    """U13: a schedule is created with its next instant, read, listed in pages and deleted."""
    async with running() as it, http(it) as client:
        answer = await client.put(URL, json=BODY)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        assert (made["name"], made["key"], made["version"], made["paused"]) == (
            "digest",
            "mail",
            1,
            False,
        )
        assert made["next_at"] > 0
        assert made["schedule"]["when"] == BODY["schedule"]["when"]
        assert made["schedule"]["call"]["payload"] == {"to": "ada"}
        assert (await client.get(URL)).json() == made
        # What was read can be changed and written.
        made["schedule"]["late"] = 60
        body = {"schedule": made["schedule"], "version": made["version"]}
        again = (await client.put(URL, json=body)).json()
        assert (again["version"], again["schedule"]["late"], again["next_at"]) == (
            2,
            60,
            made["next_at"],
        )
        assert (await client.put(URL, json=body)).json() == again  # a repetition
        body["schedule"]["late"] = 61
        problem(await client.put(URL, json=body), 409, "settings_conflict")
        for name in ("a", "b"):
            await client.put(f"/v1/schedules/{name}", json=BODY)
        page = await client.get("/v1/schedules", params={"limit": 2})
        assert [each["name"] for each in page.json()["schedules"]] == ["a", "b"]
        assert page.json()["next"] == "b"
        assert 'rel="next"' in page.headers["link"]
        page = await client.get("/v1/schedules", params={"after": "b"})
        assert [each["name"] for each in page.json()["schedules"]] == ["digest"]
        problem(await client.delete(URL, params={"version": 1}), 409, "settings_conflict")
        assert (await client.delete(URL, params={"version": 2})).json() == {"deleted": True}
        assert (await client.delete(URL)).json() == {"deleted": False}
        problem(await client.get(URL), 404, "unknown_schedule")


async def test_pause_resume_next_and_run() -> None:
    """U13: operators pause and resume a schedule, ask for its instants, run it now, and backfill."""
    async with running() as it, http(it) as client:
        await client.put(URL, json=changed(when={"type": "every", "seconds": 3600}))
        paused = (await client.post(f"{URL}/pause")).json()
        assert (paused["paused"], paused["next_at"]) == (True, None)
        instants = (await client.get(f"{URL}/next", params={"count": 3})).json()["instants"]
        assert [later - instants[0] for later in instants] == [0, 3600, 7200]
        assert not (await client.post(f"{URL}/resume")).json()["paused"]
        ran = (await client.post(f"{URL}/run", json={})).json()["confirmations"]
        assert [each["status"] for each in ran] == ["accepted"]
        until = instants[0] - 3600
        span = {"since": until - 3 * 3600, "until": until}
        ran = (await client.post(f"{URL}/run", json=span)).json()["confirmations"]
        assert [each["status"] for each in ran] == ["accepted"] * 3
        ran = (await client.post(f"{URL}/run", json=span)).json()["confirmations"]
        assert [each["status"] for each in ran] == ["duplicate"] * 3
        recent = (await client.get(URL)).json()["recent"]
        assert [each["result"] for each in recent[:4]] == ["accepted"] * 4
        assert (await it.ledger("mail")).published == 4
        wrong = await client.post(f"{URL}/run", json={"since": 5})
        problem(wrong, 422, "invalid_input", "until")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("schedule.when.expression", {"when__expression": "61 * * * *"}),
        ("schedule.when.timezone", {"when__timezone": "Mars/Olympus"}),
        ("schedule.when.seconds", {"when": {"type": "every", "seconds": 0.5}}),
        ("schedule.when.since", {"when": {"type": "every", "seconds": 5, "since": -1}}),
        ("schedule.when.since", {"when": {"type": "every", "seconds": 5, "since": 1e300}}),
        ("schedule.call.key", {"call__key": "two words"}),
        ("schedule.call.instants", {"call__instants": {"at": "text"}, "call__payload": []}),
        ("schedule.call.priority", {"call__priority": 10}),
        ("schedule.late", {"late": 0}),
        ("schedule.jitter", {"jitter": 1e6}),
        ("schedule.ends", {"starts": 100, "ends": 100}),
        ("schedule.overlap", {"overlap": "wait", "call__ordering_key": "o"}),
        ("schedule.overlap", {"overlap": "never"}),
        ("schedule.overlap", {"call__unique": {"key": "work", "until": "started"}}),
        ("schedule.call.unique.key", {"call__unique": {"key": "two words"}}),
        (
            "schedule.call.unique",
            {"call__unique": {"key": "k", "on_conflict": "replace", "debounce": {"seconds": 5}}},
        ),
        ("schedule.catch_up", {"catch_up": 5}),
        ("schedule.when.type", {"when__type": "moon"}),
        ("schedule.speed", {"speed": 5}),
    ],
)
async def test_bad_input_is_refused_with_its_field(field: str, fields: dict[str, Any]) -> None:
    """U13: each is refused before anything is stored, and the problem names the field."""
    async with running() as it, http(it) as client:
        answer = await client.put(URL, json=changed(**fields))
        problem(answer, 422, "invalid_input", field)
        assert "Mars" not in answer.text
        assert await schedules_of(it.backend).list() == ()


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """Run a server with tokens for the queues a and b, for each verb, and a schedule of each queue."""
    rows = [entry(ADMIN, "admin"), entry(A, "a", keys=["a"]), entry(B, "b", keys=["b"])]
    rows += [entry(f"only {verb}", verbs=[verb], keys=["a"]) for verb in ALL]
    path = write(tmp_path / "tokens.toml", *rows)
    async with running(tokens_file=path) as it, http(it) as client:
        for key in ("a", "b"):
            body = changed(call__key=key)
            made = await client.put(f"/v1/schedules/of-{key}", json=body, headers=bearer(ADMIN))
            assert made.status_code == 200, made.text
        yield it, client


async def test_a_schedule_needs_the_right_to_publish_to_its_queue(tmp_path: Path) -> None:
    """Security 2, U13: put needs ``publish`` for the queue, of the stored schedule as well as of the new one."""
    async with guarded(tmp_path) as (it, client):
        expected = {"only publish": 200, "only consume": 403, "only admin": 403, B: 403, A: 200}
        for token, status in expected.items():
            body = changed(call__key="a", late=60 + len(token))
            answer = await client.put("/v1/schedules/of-a", json=body, headers=bearer(token))
            assert answer.status_code == status, (token, answer.text)
        theirs = await client.put(
            "/v1/schedules/of-b", json=changed(call__key="a"), headers=bearer(A)
        )
        assert theirs.status_code == 403
        found = await schedules_of(it.backend).get("of-b")
        assert found is not None
        assert found.version == 2
        internal = changed(call__key="dispatch.callbacks")
        for token in (ADMIN, A):
            answer = await client.put("/v1/schedules/x", json=internal, headers=bearer(token))
            assert answer.status_code == 403


async def test_what_is_anothers_is_neither_shown_nor_changed(tmp_path: Path) -> None:
    """Security 2, U13: each operation on a schedule needs a right for its queue; a list leaves out the others."""
    async with guarded(tmp_path) as (_, client):
        operations = [
            ("GET", ""),
            ("GET", "/next"),
            ("POST", "/pause"),
            ("POST", "/resume"),
            ("POST", "/run"),
            ("DELETE", ""),
        ]
        for method, more in operations:
            content = "{}" if more == "/run" else None
            headers = {"content-type": "application/json"}
            url = f"/v1/schedules/of-a{more}"
            for token in (B, "only consume"):
                if token == B or method != "GET":
                    answer = await client.request(
                        method, url, content=content, headers=headers | bearer(token)
                    )
                    assert answer.status_code == 403, (url, token, answer.text)
            answer = await client.request(
                method, url, content=content, headers=headers | bearer("only admin")
            )
            assert answer.status_code == 200, answer.text
        page = (await client.get("/v1/schedules", headers=bearer(B))).json()
        assert [each["name"] for each in page["schedules"]] == ["of-b"]


async def test_the_python_api_works_through_a_server(tmp_path: Path) -> None:
    """U13: `Queue.schedules` does the same through a server as on its store."""
    async with remote(tmp_path) as (queue, backend):
        schedules = queue.schedules
        starts = datetime(2026, 1, 1, tzinfo=UTC)
        schedule = replace(DIGEST, starts=starts, late=70.5, overlap="wait")
        made = await schedules.put(schedule)
        assert made == await schedules.get("digest")
        assert made.schedule == schedule
        assert made == (await Queue(backend).schedules.get("digest"))
        assert await schedules.put(schedule) == made
        with pytest.raises(SettingsConflict):
            await schedules.put(DIGEST, version=0)
        unique = UniqueKey(key="work", on_conflict="refuse", period=60)
        mail = TaskTemplate.of("mail", instants={}, unique=unique)
        every = Schedule("every", Every(90, since=starts), mail)
        await schedules.put(every)
        assert [each.schedule for each in await schedules.list()] == [schedule, every]
        assert [each.name for each in await schedules.list(after="digest", limit=1)] == ["every"]
        assert (await schedules.pause("digest")).paused
        assert (await schedules.put(schedule)).paused
        assert not (await schedules.resume("digest")).paused
        assert len(await schedules.next("digest", 3)) == 3
        assert (await schedules.trigger("digest")).status is Published.ACCEPTED
        assert (await schedules.trigger("digest")).status is Published.DUPLICATE
        assert (
            len(await schedules.backfill("digest", starts, datetime(2026, 1, 4, tzinfo=UTC))) == 3
        )
        assert await schedules.delete("every")
        assert not await schedules.delete("every")
        with pytest.raises(UnknownKey):
            await schedules.pause("every")
        with pytest.raises(UnknownKey):
            await schedules.trigger("every")
        settings = await backend.control.settings("mail")
        await backend.control.configure("mail", settings.model_copy(update={"capacity": 1}))
        with pytest.raises(QueueFull):
            await schedules.trigger("digest", overlap="allow")
        await schedules.put(
            replace(every, name="free", call=TaskTemplate.of("mail"), overlap="allow")
        )
        stored = await backend.schedules.get("free")
        assert stored is not None
        await backend.schedules.put(replace(stored, next_at=backend.now() - 1))
        await fire_due(backend.schedules, set())
        status = await schedules.get("free")
        assert status is not None
        assert status == await Queue(backend).schedules.get("free")
        assert status.refused is not None
        assert status.refused.result == "queue_full"


async def test_what_the_server_refuses_is_named_in_python(tmp_path: Path) -> None:
    """U13: a field that only the server finds wrong, and a schedule that it cannot read."""
    async with remote(tmp_path) as (queue, backend):
        await queue.schedules.put(DIGEST)
        with pytest.raises(InvalidInput, match="key"):
            await queue.schedules.put(replace(DIGEST, call=TaskTemplate.of("other")))
        with pytest.raises(InvalidInput, match="until"):
            await queue.schedules.backfill("digest", 5, 4e9)
        await backend.schedules.put(StoredSchedule(key="mail", name="odd", spec=b'{"v":7}'))
        _, odd = await queue.schedules.list()
        assert odd.problem is not None
        assert odd.schedule is None


async def test_apply_goes_through_a_server(tmp_path: Path) -> None:
    """U13: declared schedules are created, stay, and are pruned; the server knows what declared them."""
    async with remote(tmp_path) as (queue, _):
        tasks = Tasks(prefix="shop.")
        tasks.task("sweep", schedule=Cron("@hourly"))(lambda: None)
        async with tasks.connect(queue):
            assert [each.change.value for each in (await tasks.apply()).schedules] == ["created"]
            assert (await tasks.apply()).schedules == ()
        found = await queue.schedules.get("shop.sweep")
        assert found is not None
        assert found.declared_by == "shop."
        later = Tasks(prefix="shop.")
        async with later.connect(queue):
            applied = await later.apply(prune=True)
            assert [each.change.value for each in applied.schedules] == ["deleted"]


async def test_a_token_without_the_right_gets_a_clear_error(tmp_path: Path) -> None:
    """U13: through the client, a missing right is a `ConfigurationError` that names the token's setting."""
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it:
        client = RemoteBackend(it.server.url, A)
        with pytest.raises(ConfigurationError, match="TASKQUEUE_TOKEN"):
            await Queue(client).schedules.put(DIGEST)
        await client.aclose()
