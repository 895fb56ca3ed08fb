"""An outage of Redis under a server whose workers stay connected."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.chaos.proxy import FaultProxy
from tests.redis.backends import opened
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer, wait_until
from tests.server.observed import observed
from tests.server.support import http, receipts, running

QUICK: dict[str, Any] = {"connect_timeout": 0.3, "answer_timeout": 0.3, "operation_timeout": 0.5}


async def test_workers_stay_and_go_on(redis_server: RedisServer, redis_prefix: str) -> None:
    """Fault G14: during an outage, workers are notified and stay connected; their acks are stored afterwards.

    In the first outage the store refuses connections, in the second it does not answer.
    """
    async with FaultProxy(("127.0.0.1", redis_server.port)) as link:
        host, port = link.address
        store = {"url": f"redis://{host}:{port}", "prefix": redis_prefix, **QUICK}
        variables = {f"TASKQUEUE_REDIS_{name.upper()}": str(value) for name, value in store.items()}
        async with observed("redis", variables, lease=15.0) as it:
            await it.publish("k", [b"1", b"2", b"3"])
            async with it.worker("w", credit=1) as worker:
                got = receipts(await worker.deliveries(1))
                for fail in (link.refuse, link.block):
                    fail()
                    if fail == link.refuse:
                        link.cut()
                    await worker.send("ack", receipts=got)
                    told = await worker.frame("degraded", seconds=10)
                    assert not told.get("ok", False)
                    await worker.send("ping", n=7)
                    assert (await worker.frame("pong"))["n"] == 7
                    link.heal()
                    link.cut()
                    assert (await worker.frame("degraded", seconds=10))["ok"] is True
                    assert await worker.settled(1) == (got, [])
                    await worker.send("credit", n=1)
                    got = receipts(await worker.deliveries(1))
                await worker.send("ack", receipts=got)
                assert await worker.settled(1) == (got, [])
                assert (await it.look()).connections == 1
            assert (await it.ledger("k")).done == 3


def _save_fails(server: RedisServer) -> None:
    shutil.rmtree(server.folder)
    server.call("CONFIG", "SET", "save", "900 1")
    server.call("BGSAVE")
    wait_until(lambda: server.info()["rdb_last_bgsave_status"] == "err", "the save fails")


_REFUSALS = {
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
    "READONLY": (("REPLICAOF", "127.0.0.1", "9"), ("REPLICAOF", "NO", "ONE")),
    "MISCONF": ((), ("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")),
}
"""for each error, the commands that make Redis refuse writes with it, and accept them again"""


@pytest.mark.parametrize("why", _REFUSALS)
async def test_no_write_is_possible(why: str, make_server: MakeServer, redis_prefix: str) -> None:
    """Faults B7, C3 and C5: while Redis refuses writes but answers reads, ``/health`` and ``/ready`` return 503."""
    server = make_server(aof=False).start()
    refuse, accept = _REFUSALS[why]
    async with (
        opened(server.url, redis_prefix, **QUICK) as backend,
        running(backend) as it,
        http(it) as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        if refuse:
            server.call(*refuse)
        else:
            _save_fails(server)
        assert (await client.get("/ready")).json() == {"ready": False, "reason": "store"}
        found = await client.get("/health")
        assert found.status_code == 503
        assert found.json()["details"]["error"]
        server.call(*accept)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
