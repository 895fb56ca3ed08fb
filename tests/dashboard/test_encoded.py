"""What a codec has encoded is shown as such on the pages, and never as text."""

from __future__ import annotations

import httpx2

from taskqueue_core import CodecChain, Cron, Fernet, Instant, Schedule, Tasks, Zlib
from taskqueue_core.application.encoding import Encoding
from tests.server.support import Running

KEY = "cw_0x689RpI-jtRR7oE8h_eQsKImvJapLeSbXpwF4e4="
CODEC = CodecChain(Zlib(), Fernet(keys={"2026-11": KEY}))
SHOWN = "encoded (zlib, fernet, key 2026-11)"

tasks = Tasks(codec=CODEC)


@tasks.task
async def charge(card: str, day: str = "") -> str:
    """A task whose calls are encoded."""
    return card + day


async def test_encoded_texts(it: Running, client: httpx2.AsyncClient) -> None:
    """U17: payloads, results, errors and schedules are shown as encoded, with the names of codecs and key."""
    encoding = Encoding(CODEC)
    error = encoding.error_of("LookupError", "card-4711 is unknown")
    queue = it.context.queue
    async with tasks.connect(queue):
        await tasks.publish_many(charge.using(id=name).call("card-4711") for name in ("t1", "t2"))
    subscription = it.context.backend.subscribe(["charge"], "worker-1")
    dead, done = (await subscription.receive(2, 1)).deliveries
    await subscription.dead_letter(dead, reason="no", error=error)  # type: ignore[attr-defined]
    await subscription.ack(done, results=(encoding.result(b'"card-4711"'),))
    await queue.schedules.put(Schedule("daily", Cron("@daily"), charge.call("card-4711", Instant)))
    for page, number in (
        ("/tasks/charge/t1", 2),
        ("/tasks/charge/t2", 1),
        ("/queues/charge/dead", 1),
        ("/schedules/daily", 1),
    ):
        text = (await client.get(page)).text
        assert text.count(SHOWN) == number, (page, text)
        assert "taskqueue-codec " not in text
        assert bytes(dead.task.payload).decode()[1:20] not in text
    assert f"LookupError: {SHOWN}" in (await client.get("/tasks/charge/t1")).text
