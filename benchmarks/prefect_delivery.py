"""Whether a run is sent when it is due, sent again if its worker did not ack it, and refused if the queue is full.

The worker is simulated, so that it sends exactly the messages that a measurement needs.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx2
import prefect_figures as figures
from prefect_sides import Side

from tests.prefect.replicas import Replica
from tests.prefect.support import Taker

_SIZE = 5
_AGAIN = 5.0
"""seconds to wait for a second delivery of a run that was not acked"""


def key() -> str:
    """Return a unique task key."""
    return f"add-{uuid4().hex[:8]}"


def due(side: Side) -> dict[str, float]:
    """Measure the delivery of a run with a scheduled time, and of a run that its worker has scheduled for a retry."""
    return asyncio.run(_due(side))


async def _due(side: Side) -> dict[str, float]:
    name = key()
    async with Taker(side.a.socket, name) as taker:
        begin = datetime.now(UTC)
        at = (begin + timedelta(seconds=8)).isoformat()
        run = await asyncio.to_thread(side.a.created, name, scheduled_time=at)
        scheduled = await _until(taker, run, begin)
        await taker.ack()
        begin = datetime.now(UTC)
        details = {
            "deferred": True,
            "scheduled_time": (begin + timedelta(seconds=3)).isoformat(),
        }
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "state_details": details}
        answer = await asyncio.to_thread(
            side.a.client.post, f"/task_runs/{run}/set_state", json={"state": state}
        )
        assert answer.status_code == 201, answer.text
        retried = await _until(taker, run, begin)
    return {figures.SCHEDULED: scheduled, figures.RETRIED: retried}


async def _until(taker: Taker, run: str, begin: datetime) -> float:
    """Return the seconds until a run is delivered, or `figures.PATIENCE` if it is not delivered."""
    try:
        found = await taker.receive(figures.PATIENCE)
    except TimeoutError:
        return figures.PATIENCE
    assert found["id"] == run
    return (datetime.now(UTC) - begin).total_seconds()


def again(side: Side) -> dict[str, float]:
    """Answer a delivery twice with a message that is no ack, while another worker waits for the run."""
    return asyncio.run(_again(side))


async def _again(side: Side) -> dict[str, float]:
    return {
        figures.QUIT: await _came_again(side, '{"type": "quit"}'),
        figures.GARBAGE: await _came_again(side, "{no json"),
    }


async def _came_again(side: Side, reply: str) -> float:
    name = key()
    run = await asyncio.to_thread(side.a.created, name)
    async with Taker(side.a.socket, name, client_id="first") as first:
        assert (await first.receive(figures.PATIENCE))["id"] == run
        await first.socket.send(reply)
        async with Taker(side.a.socket, name, client_id="second") as second:
            try:
                found = await second.receive(_AGAIN)
            except TimeoutError:
                return 0.0
            await second.ack()
            return float(found["id"] == run)


def full(side: Side) -> dict[str, float]:
    """Create one run more than the maximum length of the queue, at a server without workers."""
    size = {"PREFECT_SERVER_TASKS_SCHEDULING_MAX_SCHEDULED_QUEUE_SIZE": str(_SIZE)}
    name = key()
    with Replica(side.site, "small", **size) as server:
        for _ in range(_SIZE):
            server.created(name)
        patience = figures.BOUNDS[figures.FULL]
        server.client.timeout = patience
        begin = time.monotonic()
        try:
            status = server.create(name).status_code
        except httpx2.TimeoutException:
            return {figures.FULL: patience, figures.STATUS: 0}
        return {figures.FULL: time.monotonic() - begin, figures.STATUS: status}
