"""The scaling operation, which tells an autoscaler how many workers a queue needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from taskqueue_core.capabilities import QueueSettings
from tests.server.access import A, bearer, everybody
from tests.server.support import http, problem, running


async def asked(client: httpx2.AsyncClient, **query: Any) -> dict[str, Any]:
    """Return the scaling response for the queue ``k``."""
    answer = await client.get("/v1/scaling/k", params=query)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_what_there_is_to_do() -> None:
    """E7: the response contains the waiting and running tasks, the oldest age, the workers, and the wanted replicas."""
    async with running() as it, http(it) as client:
        assert await asked(client) == {
            "key": "k",
            "value": 0,
            "waiting": 0,
            "in_flight": 0,
            "oldest_age_seconds": 0.0,
            "workers": 0,
            "replicas": 0,
        }
        await it.publish(*(f"t{n}" for n in range(25)))
        await it.publish("later", not_before=it.backend.now() + 60)
        async with it.worker(credit=4) as worker:
            await worker.deliveries(4)
            told = await asked(client, per_worker=5)
            assert told["oldest_age_seconds"] > 0
            del told["oldest_age_seconds"]
            assert told == {
                "key": "k",
                "value": 25,
                "waiting": 21,
                "in_flight": 4,
                "workers": 1,
                "replicas": 5,
            }
            assert (await asked(client))["replicas"] == 3
            assert (await asked(client, per_worker=25))["replicas"] == 1
            assert (await asked(client, per_worker=24))["replicas"] == 2
            control = it.context.control
            settings = await control.configure("k", QueueSettings(max_inflight=12))
            assert (await asked(client, per_worker=5))["replicas"] == 3
            settings = await control.configure("k", settings.model_copy(update={"max_inflight": 2}))
            assert (await asked(client, per_worker=1))["replicas"] == 4, "running tasks continue"
            await control.configure("k", settings.model_copy(update={"paused": True}))
            told = await asked(client, per_worker=2)
            assert (told["replicas"], told["value"]) == (2, 25)


async def test_who_may_ask_what(tmp_path: Path) -> None:
    """C17, security 2, fault K3: a token can query only its own queues.

    The number of tasks per worker must be within its bounds.
    """
    async with running() as it, http(it) as client:
        for number in ("0", "-1", "x", "10001", ""):
            answer = await client.get("/v1/scaling/k", params={"per_worker": number})
            problem(answer, 422, "invalid_input", "per_worker")
        problem(await client.get("/v1/scaling/{}"), 422, "invalid_input", "key")
    path = everybody(tmp_path / "tokens.toml")
    async with running(tokens_file=path) as it, http(it) as client:
        problem(await client.get("/v1/scaling/a"), 401, "unauthenticated")
        assert (await client.get("/v1/scaling/a", headers=bearer(A))).status_code == 200
        problem(await client.get("/v1/scaling/b", headers=bearer(A)), 403, "forbidden")
