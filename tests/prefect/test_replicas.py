"""Tests of two replicas of Prefect's unmodified server that share a queue."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from taskqueue_prefect.names import RECEIVER, client_of
from taskqueue_redis import RedisBackend
from tests.prefect.replicas import GRACE, SAID, SECONDS, SECRET, Replica, Site, key
from tests.prefect.support import Taker, done
from tests.server.support import eventually

Pair = tuple[Replica, Replica]
DELAY = timedelta(seconds=1)


def test_it_says_what_it_uses(pair: Pair) -> None:
    """Rows E1, E8: the log names the backend and its address but no password, and has no warning about unknown code.

    This holds for a server started by Prefect's command and for one in plain uvicorn.
    """
    for replica in pair:
        assert f"{SAID} redis://127.0.0.1" in replica.log
        assert "may not work" not in replica.log
        assert SECRET not in replica.log


async def test_each_replica_knows_all_workers(pair: Pair, backend: RedisBackend) -> None:
    """Rows E1, REV-E5: each replica knows the workers of all replicas; of two with the same id, one may disconnect."""
    a, b = pair
    name, other = key(), key()

    def known(replica: Replica, *keys: str) -> dict[str, set[str]]:
        answer = replica.client.post(
            "/task_workers/filter", json={"task_worker_filter": {"task_keys": list(keys)}}
        )
        return {one["identifier"]: set(one["task_keys"]) for one in answer.json()}

    async def connections(count: int) -> bool:
        workers = [one for one in await backend.control.workers() if name in one.keys]
        return sum(client_of(one.worker_id) != RECEIVER for one in workers) == count

    async def until(replica: Replica, *there: str) -> None:
        await eventually(lambda: set(known(replica, name)) == set(there))

    async with Taker(b.socket, name, other, client_id="host-é-1"):
        async with Taker(a.socket, name, client_id="host-2"):
            for replica in pair:
                await until(replica, "host-é-1", "host-2")
                assert set(known(replica, other)) == {"host-é-1"}
                assert known(replica, other)["host-é-1"] == {name, other}
            async with Taker(b.socket, name, client_id="host-2"):
                await eventually(lambda: connections(3))
            await eventually(lambda: connections(2))
            a.created(name)

            async def in_hand() -> bool:
                return (await backend.control.ledger(name)).in_flight == 1

            await eventually(in_hand)
            assert set(known(b, name)) == {"host-é-1", "host-2"}
        await until(b, "host-é-1")
    await until(a)


@pytest.mark.parametrize("reply", ["quit", "other", "garbage", "close", "abort"])
async def test_without_an_ack_it_is_anothers(reply: str, pair: Pair, backend: RedisBackend) -> None:
    """Rows E7, REV-E3, REV-E1: however a connection ends before its ack, the run goes to another worker at once.

    No attempt or loss is counted.
    """
    a, b = pair
    name = key()
    run = a.created(name)
    async with Taker(b.socket, name, client_id="first") as first:
        assert (await first.receive())["id"] == run
        match reply:
            case "quit" | "other":
                await first.send(reply)
            case "garbage":
                await first.socket.send("{no json")
            case "close":
                await first.socket.close()
            case _:
                first.socket.transport.abort()
        async with Taker(a.socket, name, client_id="second") as second:
            assert (await second.receive())["id"] == run
            (status,) = await backend.control.statuses(name, run)
            assert status is not None
            assert (status.attempt, status.losses) == (1, 0)
            await second.ack()
            await second.nothing_comes()


async def test_its_time_is_kept(pair: Pair, backend: RedisBackend) -> None:
    """Rows REV-E1, REV-E2: a run is sent at its scheduled time, and so is its next attempt after the ack."""
    a, b = pair
    name = key()
    async with Taker(b.socket, name) as taker:
        at = datetime.now(UTC) + DELAY
        run = a.created(name, scheduled_time=at.isoformat())
        assert (await taker.receive())["id"] == run
        assert datetime.now(UTC) >= at
        await taker.ack()
        await done(backend, name, 1)
        again = datetime.now(UTC) + DELAY
        details = {"deferred": True, "scheduled_time": again.isoformat()}
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "state_details": details}
        for _ in range(2):  # the second request replaces the entry of the first
            answer = b.client.post(f"/task_runs/{run}/set_state", json={"state": state})
            assert answer.status_code == 201, answer.text
        found = await taker.receive()
        assert (found["id"], found["state"]["name"]) == (run, "AwaitingRetry")
        assert datetime.now(UTC) >= again
        await taker.ack()


async def test_what_is_sent_is_the_whole_run(pair: Pair, backend: RedisBackend) -> None:
    """Rows E7, U26: a worker receives each field of a run as the API returns it, also when the run is retried."""
    a, b = pair
    name = key()
    inputs = {"x": [{"input_type": "constant", "type": "int"}], "y": []}
    details = {"deferred": True, "task_parameters_id": str(uuid4())}
    state = {
        "type": "SCHEDULED",
        "message": "é",
        "state_details": details,
    }
    body = {
        "task_key": name,
        "dynamic_key": "0",
        "name": "run-é",
        "tags": ["a", "b"],
        "labels": {"n": 1.5, "t": True},
        "cache_key": "k",
        "cache_expiration": "2030-01-01T00:00:00.5Z",
        "empirical_policy": {"retries": 3, "retry_delay": [1, 2]},
        "task_inputs": inputs,
        "state": state,
    }
    answer = a.client.post("/task_runs/", json=body)
    assert answer.status_code == 201, answer.text
    url = f"/task_runs/{answer.json()['id']}"

    def stored() -> dict[str, Any]:
        return _without_lateness(b.client.get(url).json())

    async with Taker(b.socket, name) as taker:
        sent = _without_lateness(await taker.receive(SECONDS))
        assert sent == stored()
        assert (sent["name"], sent["labels"], sent["task_inputs"]) == (
            "run-é",
            body["labels"],
            inputs,
        )
        await taker.ack()
        again = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        asked = {"state": again | {"state_details": details}, "force": True}
        assert a.client.post(f"{url}/set_state", json=asked).status_code == 201
        sent = _without_lateness(await taker.receive(SECONDS))
        assert sent == stored()
        assert sent["state"]["name"] == "AwaitingRetry"
        await taker.ack()
    await done(backend, name, 2)
    a.complete(answer.json()["id"])


def _without_lateness(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run without the field that grows with time."""
    return {field: run[field] for field in run if field != "estimated_start_time_delta"}


def test_look_ups_share_a_prepared_query(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row U26: PostgreSQL prepares one query for look-ups of any size."""
    monkeypatch.setattr(site, "more", site.settings)
    assert len(site.run("look_up.py", api="")) == 1


async def test_keys_take_turns(pair: Pair) -> None:
    """Row E5: a worker of several tasks gets runs of each task in turn."""
    a, b = pair
    names = [key() for _ in range(3)]
    runs = {a.created(name): name for name in names for _ in range(3)}
    async with Taker(b.socket, *names) as taker:
        seen = []
        for _ in runs:
            seen.append(runs[(await taker.receive())["id"]])
            await taker.ack()
    assert all(set(seen[n : n + 3]) == set(names) for n in (0, 3, 6))


async def test_a_full_queue_says_so(pair: Pair, backend: RedisBackend) -> None:
    """Row REV-E4: while a queue is full, creating a run is answered with 503 at once, and works again afterwards."""
    a, b = pair
    name = key()
    a.created(name)
    settings = await backend.control.settings(name)
    assert settings.capacity == 1000
    full = settings.model_copy(update={"capacity": 3})
    await backend.control.configure(name, full)
    runs = [a.created(name) for _ in range(2)]
    for replica in pair:
        # this client has a timeout, so a missing answer would be noticed
        answer = replica.create(name)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
    for replica in pair:
        assert replica.state(runs[0]) == "Scheduled"
    kept = a.client.post("/task_runs/filter", json={"task_runs": {"name": {"any_": [name]}}})
    assert len(kept.json()) == 3  # refused runs are not stored in the database
    async with Taker(b.socket, name) as taker:
        await taker.receive()
        await taker.ack()
        await taker.receive()
        assert a.create(name).status_code == 201
        await taker.ack()
        for _ in range(2):
            await taker.receive()
            await taker.ack()
    led = await backend.control.ledger(name)
    assert led.balanced


async def test_what_is_cancelled_is_not_sent(pair: Pair, backend: RedisBackend) -> None:
    """A run that is cancelled in Prefect is removed from the queue, not executed (law 1)."""
    a, b = pair
    name = key()
    dropped, wanted = a.created(name), a.created(name)
    state = {"state": {"type": "CANCELLED"}, "force": True}
    assert a.client.post(f"/task_runs/{dropped}/set_state", json=state).status_code == 201
    async with Taker(b.socket, name) as taker:
        assert (await taker.receive())["id"] == wanted
        await taker.ack()
        await taker.nothing_comes()
        await done(backend, name, 2)
        ledger = await backend.control.ledger(name)
        assert (ledger.published, ledger.balanced) == (2, True)


async def test_accepted_and_never_begun(pair: Pair, backend: RedisBackend) -> None:
    """Row E8: an accepted run stays with its worker while it is connected, and goes to another one afterwards."""
    a, b = pair
    name = key()
    run = a.created(name)
    async with Taker(b.socket, name, client_id="held") as first:
        assert (await first.receive())["id"] == run
        await first.ack()
        async with Taker(a.socket, name, client_id="other") as second:
            await second.nothing_comes(2 * GRACE)
            (result,) = await backend.control.results(name, run)
            assert result is not None
            assert client_of(json.loads(result)["worker"]) == "held"
            first.socket.transport.abort()
            assert (await second.receive(SECONDS))["id"] == run
            await second.ack()
            await second.nothing_comes(2 * GRACE)


async def test_keys_of_any_spelling(pair: Pair) -> None:
    """Rows E1, E7: task keys with any characters work, and so do large runs within the limit of a worker."""
    a, b = pair
    names = ["größe-1a2b3c4d", "ключ-1a2b3c4d", "{x}-1", "k" * 500 + "-1", "~-1", ""]
    async with Taker(b.socket, *names, client_id="é" * 300) as taker:
        for name in names:
            run = a.created(name)
            found = await taker.receive()
            assert (found["id"], found["task_key"]) == (run, name)
            await taker.ack()
        asked = {"task_worker_filter": {"task_keys": [names[0]]}}
        (worker,) = a.client.post("/task_workers/filter", json=asked).json()
        assert names[0] in worker["task_keys"]
        inputs = {f"i{n}": [{"input_type": "constant", "type": "x" * 1000}] for n in range(500)}
        run_of = {"task_key": names[0], "dynamic_key": "1", "name": "large", "task_inputs": inputs}
        state = {"type": "SCHEDULED", "state_details": {"deferred": True}}
        answer = a.client.post("/task_runs/", json=run_of | {"state": state})
        assert answer.status_code == 201, answer.text
        assert (await taker.receive())["id"] == answer.json()["id"]
        await taker.ack()
