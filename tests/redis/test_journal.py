"""The journal: every transition of a queue that asked for it, written by the script that makes it."""

from typing import Any

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.servers import RedisServer


def journal(server: RedisServer, prefix: str) -> list[dict[str, str]]:
    """Read all of it."""
    entries: list[Any] = server.call("XRANGE", f"{{{prefix}:0}}:journal", "-", "+")
    return [
        {
            fields[n].decode(): fields[n + 1].decode(errors="replace")
            for n in range(0, len(fields), 2)
        }
        for _, fields in entries
    ]


async def test_a_life_is_written_down(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Law 1: publish, delivery, loss, retry, death, redrive and ack, in order, numbered without gaps."""
    assert redis_url
    backend = RedisBackend()
    try:
        await backend.control.configure("k", QueueSettings(journal=True))
        await backend.publisher.publish(Task(key="k", id="t1", tenant="acme"))
        await backend.publisher.publish(Task(key="quiet", id="t2"))
        async with backend.subscribe(["k"], "w") as subscription:

            async def take() -> Any:
                (delivery,) = (await subscription.receive(1, 5)).deliveries
                return delivery

            await subscription.redeliver(await take(), lost=True)
            delivery = await take()
            await backend.publisher.schedule_retry(
                delivery.task, backend.now() - 1, error="boom", settles=delivery
            )
            await subscription.dead_letter(await take(), "enough", "boom again")
            assert await backend.dead_letters.redrive("k") == 1
            await subscription.ack(await take())
        lines = journal(redis_server, redis_prefix)
        assert [line["event"] for line in lines] == [
            "published", "delivered", "lost", "delivered", "retried", "available", "delivered",
            "dead_lettered", "redriven", "delivered", "acked",
        ]  # fmt: skip
        assert [int(line["seq"]) for line in lines] == list(range(1, 12))
        assert {line["task_id"] for line in lines} == {"t1"}
        assert lines[0]["tenant"] == "acme"
        assert (lines[4]["error"], lines[7]["reason"]) == ("boom", "enough")
        assert {line["worker"] for line in lines if line["event"] == "delivered"} == {"w"}
    finally:
        await backend.aclose()
