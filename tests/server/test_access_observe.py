"""The verb ``observe``: it shows what happens, but no payload and no result, and it changes nothing."""

from __future__ import annotations

from pathlib import Path

from msgspec import Raw

from taskqueue_core import Every, Schedule, TaskTemplate
from taskqueue_core.hooks import Identity
from tests.server.access import bearer, entry, write
from tests.server.support import Running, http, running
from tests.server.test_access_scopes import GUARDED, ask, denied, name

OBSERVER, ADMIN = "tq_looks-only", "tq_operates"
SECRET = "secret-4711"
PAYLOAD = b'{"card": "secret-4711"}'
WITH_A_TASK = (
    "/v1/tasks/a/done",
    "/v1/tasks/a/dead",
    "/v1/tasks/a/done?detail=true",
    "/v1/tasks/a/dead?detail=true",
    "/v1/queues/a/tasks?state=dead",
    "/tasks/a/done",
    "/tasks/a/dead",
    "/",
    "/queues/a",
    "/queues/a/dead",
    "/schedules",
    "/v1/schedules/s",
    "/schedules/s",
)


async def _filled(it: Running) -> None:
    """Publish tasks and a schedule whose payloads and results have the secret: one is done, one is dead."""
    await it.publish("done", key="a", payload=PAYLOAD)
    await it.publish("dead", key="a", payload=PAYLOAD)
    subscription = it.backend.subscribe(["a"], "w")
    for delivery in (await subscription.receive(2, 5)).deliveries:
        if delivery.task.id == "done":
            await subscription.ack(delivery, results=[f'"{SECRET}"'.encode()])
        else:
            await subscription.dead_letter(delivery, reason="card refused")  # type: ignore[attr-defined]
    await subscription.close()
    template = TaskTemplate(key="a", payload=Raw(PAYLOAD))
    await it.context.queue.schedules.put(Schedule("s", Every(3600), template))


async def test_an_observer_sees_no_payload_and_changes_nothing(tmp_path: Path) -> None:
    """U21: each operation that permits ``observe`` shows neither payload nor result; all others answer 403."""
    path = write(
        tmp_path / "tokens.toml",
        entry(OBSERVER, "screen", verbs=["observe"]),
        entry(ADMIN, "ops", verbs=["admin"]),
    )
    async with running(tokens_file=path) as it, http(it) as client:
        await _filled(it)
        for one in GUARDED:
            if "observe" not in one.verbs:
                denied(await ask(client, one, OBSERVER), 403)
            elif name(one) != "GET /live":  # the response of an event stream never ends
                answer = await ask(client, one, OBSERVER)
                assert answer.status_code in {200, 303, 404}, (name(one), answer.text)
                assert SECRET not in answer.text, name(one)
        shown = 0
        for where in WITH_A_TASK:
            answer = await client.get(where, headers=bearer(OBSERVER))
            assert answer.status_code == 200, where
            assert SECRET not in answer.text, where
            assert 'method="post"' not in answer.text.replace('method="post" action="/logout"', "")
            shown += SECRET in (await client.get(where, headers=bearer(ADMIN))).text
        assert shown == 5  # the result, the dead letter twice, and the schedule twice


def test_a_pattern_covers_internal_queues() -> None:
    """U21: ``observe`` on all keys includes the queues that the server itself uses, as ``admin`` does."""
    screen = Identity(name="screen", verbs=frozenset({"observe"}))
    assert screen.is_allowed("observe", "dispatch.callbacks")
    assert screen.is_allowed("observe", "_taskqueue.workflows")
    assert not screen.is_allowed("publish", "a")
