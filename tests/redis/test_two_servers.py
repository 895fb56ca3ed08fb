"""Two servers on one Redis, and workers that move between them (A1, A13, D7, E1)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.tasks import State
from taskqueue_redis import RedisBackend
from taskqueue_server.context import server as hub
from tests.redis.conftest import MakeServer
from tests.server.access import ADMIN, everybody
from tests.server.support import Running, eventually, http, receipts, running


async def test_from_one_server_to_the_other(redis_url: str) -> None:
    """E1, A1: a task published through one server is executed and settled by a worker of the other."""
    assert redis_url
    async with running(RedisBackend()) as here, running(RedisBackend()) as there:
        async with there.worker(credit=5) as worker:
            await here.publish("t1")
            got = receipts(await worker.deliveries(1))
            await worker.send("ack", receipts=got)
            assert await worker.settled(1) == (got, [])
        assert await here.count(State.DONE) == 1


async def test_a_session_on_both(redis_url: str, tmp_path: Path) -> None:
    """Security 1: a session that one server starts is open on the other at once, and a sign-out ends it on both."""
    assert redis_url
    path = everybody(tmp_path / "tokens.toml")
    async with (
        running(RedisBackend(), tokens_file=path) as here,
        running(RedisBackend(), tokens_file=path) as there,
        http(here) as first,
        http(there) as second,
    ):
        answer = await first.post("/login", data={"token": ADMIN})
        cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
        first.cookies.clear()
        assert (await second.get("/v1/queues", headers=cookie)).status_code == 200
        await second.post("/logout", headers=cookie)

        async def is_refused() -> bool:
            return (await first.get("/v1/queues", headers=cookie)).status_code == 401

        await eventually(is_refused)


@asynccontextmanager
async def leaving_and_staying(
    monkeypatch: pytest.MonkeyPatch, handover: float
) -> AsyncIterator[tuple[Running, Running, list[str]]]:
    """Run two servers, and stop the first while its worker ``w`` has a task; return both and the task's receipt."""
    monkeypatch.setattr(hub, "_HANDOVER_SECONDS", handover)
    async with running(RedisBackend(), drain=0.1) as leaving, running(RedisBackend()) as staying:
        await leaving.publish("t1")
        async with leaving.worker("w", credit=1) as worker:
            got = receipts(await worker.deliveries(1))
            leaving.server.stop()
            assert await worker.closed() == 1012
        yield leaving, staying, got


async def test_a_worker_takes_what_it_runs_along(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, D7, fault A7: a stopping server keeps the leases until its worker has connected to the other server."""
    assert redis_url
    async with leaving_and_staying(monkeypatch, 1.0) as (leaving, staying, got):
        async with staying.worker("w", credit=1, holding=got) as worker:
            assert worker.welcome["adopted"] == got
            assert leaving.ended
            await leaving.ended
            await worker.send("ack", receipts=got)
            assert await worker.settled(1) == (got, [])
        stats = await staying.backend.control.stats("k")  # type: ignore[attr-defined]
        assert (stats.ledger.done, stats.delivered, stats.redelivered, stats.lost) == (1, 1, 0, 0)


async def test_what_no_worker_comes_for_goes_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, fault A7: if its worker does not reconnect, a stopping server soon releases the delivery without a loss."""
    assert redis_url
    async with (
        leaving_and_staying(monkeypatch, 0.1) as (_, staying, got),
        staying.worker("other", credit=1) as other,
    ):
        (again,) = await other.deliveries(1)
        assert (again["attempt"], again.get("losses", 0)) == (1, 0)
        await other.send("ack", receipts=got)
        assert await other.settled(1) == ([], got)


async def test_a_redis_that_would_lose_tasks_is_not_served(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault B9: on a Redis that may evict tasks, the server ends at once with an error that names the remedy."""
    server = make_server(config={"maxmemory-policy": "allkeys-lru"}).start()
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", server.url)
    with pytest.raises(ConfigurationError, match="noeviction"):
        async with running(RedisBackend()):
            pass
