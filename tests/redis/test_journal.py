"""The journal: every transition of a queue that asked for it, written by the script that makes it."""

from typing import Any

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.servers import RedisServer

COLUMNS = ("task_id", "attempt", "losses", "priority", "tenant", "ordering_key", "due_at", "error")

def journal(server: RedisServer, prefix: str) -> list[dict[str, str]]:
    """Read all of it, a line per transition."""
    entries: list[Any] = server.call("XRANGE", f"{{{prefix}:0}}:journal", "-", "+")
    lines = []
    for place, words in entries:
        texts = [word.decode(errors="replace") for word in words]
        fields = dict(zip(texts[::2], texts[1::2], strict=True))
        columns = {name: fields.pop(name).split("\0") for name in COLUMNS}
        for n in range(len(columns["task_id"])):
            row = {name: values[n] if len(values) > 1 else values[0] for name, values in columns.items()}
            lines.append({"seq": str(int(place.split(b"-")[0]) + n), **fields, **row})
    return lines


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
            "configured", "published", "delivered", "lost", "delivered", "retried", "available", "delivered",
            "dead_lettered", "redriven", "delivered", "acked",
        ]  # fmt: skip
        assert [int(line["seq"]) for line in lines] == list(range(1, 13))
        assert {line["task_id"] for line in lines[1:]} == {"t1"}
        assert lines[1]["tenant"] == "acme"
        assert (lines[5]["error"], lines[8]["reason"]) == ("boom", "enough")
        assert {line["worker"] for line in lines if line["event"] == "delivered"} == {"w"}
    finally:
        await backend.aclose()
