"""HTTP requests that wait for the end of a task.

They are answered at once if the task ends on this server, and soon if it ends on another one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import Hooks
from taskqueue_core.tasks import Task, TaskStatus
from taskqueue_memory import MemoryBackend
from taskqueue_server import create_app
from taskqueue_server.context.waiters import MAX_WAIT, ResultWaiters
from taskqueue_server.problems import ProblemError
from tests.server.support import Running, eventually, http, problem, running, settings

pytestmark = pytest.mark.fast_clock
_SOON = 1.0
"""seconds, far less than the requests are willing to wait"""


async def waiting(it: Running, number: int) -> None:
    """Wait until the server has ``number`` waiting requests."""
    await eventually(lambda: len(it.context.waiters) == number)


async def ask(
    it: Running, url: str = "/v1/tasks/k/a", wait: int = MAX_WAIT
) -> tuple[httpx2.Response, float]:
    """Send a waiting request; return the response and the seconds that it took."""
    async with http(it, timeout=40) as client:
        begun = asyncio.get_running_loop().time()
        answer = await client.get(url, params={"wait": wait})
        return answer, asyncio.get_running_loop().time() - begun


async def _event(event: asyncio.Event) -> None:
    await event.wait()


class _Counting:
    """A control interface that counts status lookups and can simulate an outage."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[int] = []
        self.away = False

    async def statuses(self, key: str, *ids: str) -> tuple[TaskStatus | None, ...]:
        """Count the call, and query the wrapped control interface."""
        self.calls.append(len(ids))
        if self.away:
            raise BackendUnavailable("away")
        found: tuple[TaskStatus | None, ...] = await self._inner.statuses(key, *ids)
        return found


class TestTheEnd:
    """A waiting request is answered when its task ends."""

    async def test_an_end_on_this_server_is_answered_at_once(self) -> None:
        """An ack over a socket of the same server answers the waiting request at once.

        No other status lookup is needed.
        """
        async with running() as it, it.worker(keys=("k",)) as worker:
            it.context.waiters._period = 60
            await it.publish("a")
            asked = asyncio.create_task(ask(it, "/v1/tasks/k/a/result"))
            await waiting(it, 1)
            await worker.send("credit", n=1)
            (delivery,) = await worker.deliveries(1)
            await worker.send(
                "ack", receipts=[delivery["receipt"]], results={delivery["receipt"]: {"x": 1}}
            )
            answer, seconds = await asked
            assert (answer.status_code, answer.json()) == (200, {"x": 1})
            assert seconds < _SOON
            await waiting(it, 0)

    @pytest.mark.parametrize("end", ["cancel", "discard", "elsewhere"])
    async def test_other_ends(self, end: str) -> None:
        """A cancelled or dead task has ended, too; an end on another server is noticed within a second."""
        async with running() as it, http(it) as client:
            await it.publish("a")
            asked = asyncio.create_task(ask(it))
            await waiting(it, 1)
            if end == "cancel":
                assert (await client.delete("/v1/tasks/k/a")).json() == {"cancelled": True}
            else:
                subscription = it.backend.subscribe(["k"], "w")
                (delivery,) = (await subscription.receive(1, 1)).deliveries
                if end == "discard":
                    await subscription.dead_letter(delivery, "no", "why")  # type: ignore[attr-defined]
                else:
                    await subscription.ack(delivery)
                await subscription.close()
            answer, seconds = await asked
            states = {"cancel": "cancelled", "discard": "dead", "elsewhere": "done"}
            assert answer.json()["state"] == states[end]
            assert seconds < _SOON

    async def test_what_has_ended_is_answered_at_once(self, api: httpx2.AsyncClient) -> None:
        """A request for a task that has already ended, or that is unknown, does not wait."""
        await api.post("/v1/tasks", json={"key": "k", "id": "a"})
        await api.delete("/v1/tasks/k/a")
        async with asyncio.timeout(_SOON):
            answer = await api.get("/v1/tasks/k/a?wait=30")
            assert answer.json()["state"] == "cancelled"
            problem(await api.get("/v1/tasks/k/a/result?wait=30"), 404, "no_result")
            problem(await api.get("/v1/tasks/k/x?wait=30"), 404, "unknown_task")
            problem(await api.get("/v1/tasks/k/x/result?wait=30"), 404, "no_result")

    async def test_time_is_up(self) -> None:
        """When the wait time is over, the response contains the current state of the task."""
        async with running() as it:
            await it.publish("a")
            answer, seconds = await ask(it, wait=1)
            assert answer.json()["state"] == "waiting"
            assert 1 <= seconds < 1.5

    async def test_nonsense_where_there_is_a_result(self) -> None:
        """Fault K4: an invalid wait time is refused even if the result already exists."""
        async with running() as it, http(it) as client:
            await it.publish("a")
            async with it.backend.subscribe(["k"], "w") as subscription:
                (delivery,) = (await subscription.receive(1, 1)).deliveries
                await subscription.ack(delivery, results=[b"1"])
            assert (await client.get("/v1/tasks/k/a/result?wait=30")).json() == 1
            answer = await client.get("/v1/tasks/k/a/result?wait=31")
            problem(answer, 422, "invalid_input", "wait")

    @pytest.mark.parametrize("wait", ["31", "-1", "1.5", "x", "", "NaN", "inf", "9" * 30])
    async def test_nonsense(self, api: httpx2.AsyncClient, wait: str) -> None:
        """Fault K4: the wait time must be a whole number of seconds within the limit."""
        for url in ("/v1/tasks/k/a", "/v1/tasks/k/a/result"):
            problem(await api.get(url, params={"wait": wait}), 422, "invalid_input", "wait")


class TestBounds:
    """Waiting requests are cheap and limited in number."""

    async def test_one_look_for_all(self, backend: MemoryBackend) -> None:
        """Five hundred waiting requests cause one status lookup per period, and none once they have been answered."""
        app = create_app(backend, settings())
        control = _Counting(backend.control)
        waiters = ResultWaiters(control, app.state.context.hooks, asyncio.Event(), period=0.05)  # type: ignore[arg-type]
        plugins = app.state.context.hooks.plugins

        async def forever() -> None:
            await asyncio.Event().wait()

        await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(500)))
        tasks = [asyncio.create_task(waiters.wait("k", f"t{n}", 30, forever())) for n in range(500)]
        await eventually(lambda: len(control.calls) >= 6)
        assert set(control.calls[1:-1]) == {500}
        control.away = True  # waiting continues during an outage of the store
        seen = len(control.calls)
        await eventually(lambda: len(control.calls) >= seen + 2)
        assert not any(task.done() for task in tasks)
        control.away = False
        await backend.control.purge("k")
        async with asyncio.timeout(_SOON):
            await asyncio.gather(*tasks)
        assert len(waiters) == 0
        assert app.state.context.hooks.plugins == plugins
        await backend.aclose()

    async def test_no_more_than_so_many(self) -> None:
        """Security 12 and 22: when too many requests are waiting, another one gets 503 with Retry-After.

        Finished requests free their places.
        """
        async with running() as it, http(it) as client:
            it.context.waiters._slots._most = 2
            await it.publish("a", "b")
            asked = [asyncio.create_task(ask(it, f"/v1/tasks/k/{i}")) for i in "ab"]
            await waiting(it, 2)
            answer = await client.get("/v1/tasks/k/a?wait=1")
            problem(answer, 503, "too_many_waiters")
            assert answer.headers["retry-after"] == "1"
            assert (await client.get("/v1/tasks/k/a")).status_code == 200
            await client.delete("/v1/tasks/k/a")
            await asked[0]
            await waiting(it, 1)
            asked[0] = asyncio.create_task(ask(it, "/v1/tasks/k/b"))
            await waiting(it, 2)
            await client.delete("/v1/tasks/k/b")
            for answer, _ in await asyncio.gather(*asked):
                assert answer.json()["state"] == "cancelled"

    async def test_one_token_cannot_take_all_the_room(self, backend: MemoryBackend) -> None:
        """Security 22: one identity may use at most half of the places for waiting requests.

        When its requests have ended, nothing about it is stored.
        """
        await backend.publisher.publish(Task(key="k", id="a"))
        waiters = ResultWaiters(backend.control, Hooks(), asyncio.Event(), most=4)
        forever = asyncio.Event()

        def wait(who: str) -> asyncio.Task[None]:
            return asyncio.create_task(waiters.wait("k", "a", 30, _event(forever), who))

        inside = [wait("one"), wait("one")]
        await eventually(lambda: len(waiters) == 2)
        with pytest.raises(ProblemError) as caught:
            await wait("one")
        assert (caught.value.problem.status, caught.value.headers) == (429, {"retry-after": "1"})
        inside += [wait("other"), wait("third")]
        await eventually(lambda: len(waiters) == 4)
        with pytest.raises(ProblemError) as caught:
            await wait("fourth")
        assert caught.value.problem.status == 503
        forever.set()
        await asyncio.gather(*inside)
        assert not waiters._slots._per_client
        await backend.aclose()

    async def test_who_hangs_up_waits_no_longer(self) -> None:
        """Security 12: a request whose client has disconnected frees its place."""
        async with running() as it:
            await it.publish("a")
            asked = asyncio.create_task(ask(it))
            await waiting(it, 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await waiting(it, 0)

    async def test_a_drain_answers_all_waiting_requests(self) -> None:
        """A draining server answers all waiting requests at once, so that they do not delay its exit."""
        async with running(drain=20.0) as it:
            await it.publish("a")
            asked = [asyncio.create_task(ask(it)) for _ in range(3)]
            await waiting(it, 3)
            begun = asyncio.get_running_loop().time()
            it.server.stop()
            for answer, _ in await asyncio.gather(*asked):
                assert answer.json()["state"] == "waiting"
            assert it.ended is not None
            await it.ended
            assert asyncio.get_running_loop().time() - begun < _SOON

    async def test_a_drain_while_the_store_is_silent(self, backend: MemoryBackend) -> None:
        """Fault G14: a status lookup that hangs does not delay a drain, and its task is cancelled."""
        await backend.publisher.publish(Task(key="k", id="a"))
        asked, draining = asyncio.Event(), asyncio.Event()

        class Silent(_Counting):
            async def statuses(self, key: str, *ids: str) -> tuple[TaskStatus | None, ...]:
                asked.set()
                await asyncio.Event().wait()
                raise AssertionError((key, ids))

        waiters = ResultWaiters(Silent(backend.control), Hooks(), draining)  # type: ignore[arg-type]
        waiting = asyncio.create_task(waiters.wait("k", "a", 30, _event(asyncio.Event())))
        await asked.wait()
        draining.set()
        async with asyncio.timeout(_SOON):
            await waiting
        assert len(waiters) == 0
        assert len(asyncio.all_tasks()) == 1
        await backend.aclose()
