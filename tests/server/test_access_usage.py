"""Limits for each identity: requests and tasks per second, and sockets open at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from taskqueue_core.hooks import Identity
from taskqueue_server.auth import quotas
from taskqueue_server.auth.quotas import MAX_DEBT, Quotas
from taskqueue_server.problems import ProblemError
from tests.prefect.support import KEY, Taker, url_of
from tests.server.access import ADMIN, A, B, Plugin, bearer, entry, guarded, write
from tests.server.support import Running, eventually, http, problem, running

EVENTS = "/api/events/in"


class Clock:
    """A clock that moves only when the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def identity(name: str = "n", **limits: Any) -> Identity:
    """Return an identity with these limits."""
    return Identity(name=name, **limits)


@pytest.fixture
def clock() -> Clock:
    """A clock that the test controls."""
    return Clock()


@pytest.fixture
def usage(clock: Clock) -> Quotas:
    """Quotas without any usage yet."""
    return Quotas(clock)


def waits(usage: Quotas, who: Identity, tasks: int = 0) -> int:
    """Return the seconds after which a refused request may be retried, or 0 if the request is admitted."""
    try:
        usage.spend(who, tasks)
    except ProblemError as error:
        told = error
    else:
        return 0
    assert (told.problem.status, told.problem.code) == (429, "rate_limited")
    return int(told.headers["retry-after"])


class TestRate:
    """Security 12 and 22: the request rate of an identity."""

    @pytest.mark.parametrize(
        ("limits", "most"), [({"rate": 5}, 5), ({"rate": 2, "burst": 7}, 7), ({"rate": 0.5}, 1)]
    )
    def test_exactly(self, usage: Quotas, clock: Clock, limits: dict[str, Any], most: int) -> None:
        """Exactly one burst is admitted at once, and then one request for each interval of the rate.

        Idle time never saves up more than one burst.
        """
        who = identity(**limits)
        for _ in range(3):
            assert [waits(usage, who) for _ in range(most)] == [0] * most
            assert waits(usage, who) == max(1, round(1 / who.rate))  # type: ignore[operator]
            clock.now += 0.99 / who.rate  # type: ignore[operator]
            assert waits(usage, who)
            clock.now += 0.02 / who.rate  # type: ignore[operator]
            assert not waits(usage, who)
            assert waits(usage, who)
            clock.now += 1e6

    def test_a_client_that_waits_as_asked_is_admitted(self, usage: Quotas, clock: Clock) -> None:
        """A client that waits for the time in ``Retry-After`` is admitted, and refused requests use no quota."""
        who = identity(rate=0.1, burst=1)
        assert not waits(usage, who)
        for _ in range(100):
            assert waits(usage, who) == 10
        clock.now += 10
        assert not waits(usage, who)

    def test_tasks_count(self, usage: Quotas, clock: Clock) -> None:
        """A batch is always admitted as a whole; the tasks beyond the rate delay later requests."""
        who = identity(rate=10)
        assert not waits(usage, who)
        assert not waits(usage, who, 1000)
        assert waits(usage, who) == 100
        clock.now += 99
        assert waits(usage, who) == 1
        clock.now += 1
        assert not waits(usage, who)

    def test_batches_at_the_same_time(self, usage: Quotas) -> None:
        """Batches that are admitted at the same time exceed the maximum debt by at most one batch."""
        who = identity(rate=10, burst=1000)
        let_in = 0
        while not waits(usage, who, 1000):
            let_in += 1000
            assert let_in <= MAX_DEBT + 2000
        assert let_in >= MAX_DEBT

    def test_names_are_distinguished(self, usage: Quotas) -> None:
        """Tokens of one name share a quota, and other names have their own. Without a limit nothing is refused."""
        assert not waits(usage, identity(rate=1))
        assert waits(usage, identity(rate=1, keys=("a",)))
        assert not waits(usage, identity("m", rate=1))
        assert not any(waits(usage, identity(), 10**6) for _ in range(100))

    def test_a_new_rate_counts_at_once(self, usage: Quotas, clock: Clock) -> None:
        """A changed rate applies at once.

        A lower rate allows no more than its own burst; a higher rate shortens the wait.
        """
        assert not waits(usage, identity(rate=100))
        assert [waits(usage, identity(rate=2)) for _ in range(3)] == [0, 0, 1]
        clock.now += 0.1
        assert not waits(usage, identity(rate=100))

    def test_memory_is_bounded(self, usage: Quotas, monkeypatch: pytest.MonkeyPatch) -> None:
        """Quotas are kept for a limited number of names, and the name that was unused for longest is dropped.

        Names without limits are never stored.
        """
        monkeypatch.setattr(quotas, "MAX_NAMES", 10)
        for n in range(100):
            assert not waits(usage, identity("busy", rate=1000))
            assert not waits(usage, identity(f"n{n}", rate=1))
            assert not waits(usage, identity(f"m{n}"))
        assert len(usage._remaining) == 10
        assert waits(usage, identity("n99", rate=1))
        assert not waits(usage, identity("n0", rate=1))


class TestSockets:
    """Security 12 and 22: the number of sockets that an identity may have open."""

    def test_exactly(self, usage: Quotas) -> None:
        """Exactly the allowed number of sockets is admitted, even if one socket is closed twice.

        Nothing is stored for an identity without a limit.
        """
        who = identity(connections=2)
        first, second = usage.enter(who), usage.enter(who)
        assert first
        assert second
        assert usage.enter(who) is None
        assert usage.enter(identity("m", connections=1))
        first.close()
        first.close()
        assert usage.enter(who)
        assert usage.enter(who) is None
        second.close()
        assert usage._sockets == {"n": 1, "m": 1}
        assert all(usage.enter(identity()) for _ in range(100))
        assert set(usage._sockets) == {"n", "m"}

    def test_refused_clients_are_forgotten(self, usage: Quotas) -> None:
        """Nothing is stored for an identity that has no open socket."""
        place = usage.enter(identity(connections=1))
        assert place
        place.close()
        assert not usage._sockets


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": "mail-*"},
        {"keys": (3,)},
        {"verbs": "admin"},
        {"verbs": frozenset({3})},
        {"name": 3},
    ],
)
def test_what_is_no_identity(wrong: dict[str, Any]) -> None:
    """Security 2: a string in place of a list is refused: in "mail-*" the character "*" would match every key."""
    with pytest.raises(
        TypeError, match="Identity needs a name, a set of verbs and a tuple of keys"
    ):
        Identity(**{"name": "n", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"rate": -1.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"burst": 0},
        {"connections": "3"},
    ],
)
def test_what_is_no_limit_of_an_identity(wrong: dict[str, Any]) -> None:
    """Security 2: limits of an identity that are no finite numbers above 0 are refused."""
    with pytest.raises(TypeError, match="Identity: rate, burst and connections must be finite"):
        Identity(**{"name": "n", **wrong})


def test_lists_do_as_well() -> None:
    """An identity copies its lists, so that later changes by a plugin do not change the rights."""
    keys = ["a"]
    found = Identity(name="n", verbs={"admin"}, keys=keys)  # type: ignore[arg-type]
    keys.append("*")
    assert not found.is_allowed("admin", "b")
    assert hash(found) == hash(Identity(name="n", verbs=frozenset({"admin"}), keys=("a",)))


async def statuses(it: Running, tokens: Iterable[str], path: str = "/v1/queues/a") -> list[int]:
    """Send one request for each token, one after the other, and return the status codes."""
    async with http(it) as client:
        return [(await client.get(path, headers=bearer(one))).status_code for one in tokens]


class TestServer:
    """How a running server enforces the limits of an identity."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """A token file with two limited tokens of the same name, and an admin token without limits."""
        return write(
            tmp_path / "tokens.toml",
            entry(A, "a", keys=["a"], rate=0.01, burst=3, connections=1),
            entry(B, "a", keys=["a"], rate=0.01, burst=3, connections=1),
            entry(ADMIN, "admin"),
        )

    async def test_requests(self, path: Path) -> None:
        """Security 22: a client over its rate gets 429 with Retry-After, and other identities are not affected."""
        async with guarded(path) as it, http(it) as client:
            assert await statuses(it, [A, B, A, A, B]) == [200, 200, 200, 429, 429]
            answer = await client.get("/v1/queues/a", headers=bearer(A))
            problem(answer, 429, "rate_limited")
            assert 90 <= int(answer.headers["retry-after"]) <= 100
            page = await client.get("/queues/a", headers=bearer(A) | {"accept": "text/html"})
            assert (page.status_code, page.headers["retry-after"]) == (429, "100")
            assert await statuses(it, [ADMIN] * 10) == [200] * 10
            assert await statuses(it, ["tq_wrong"] * 5) == [401] * 5
            assert (await client.get("/health", headers=bearer(A))).status_code == 200

    async def test_what_is_forbidden_counts(self, path: Path) -> None:
        """Security 22: requests that are answered with 403 count against the rate, too."""
        async with guarded(path) as it:
            assert await statuses(it, [A] * 5, "/v1/queues/b") == [403, 403, 403, 429, 429]

    async def test_tasks_of_a_batch(self, path: Path) -> None:
        """Security 22: each task of a batch counts against the rate; an admitted batch is answered completely."""
        async with guarded(path) as it, http(it) as client:
            body = "".join(json.dumps({"key": "a", "id": f"t{n}"}) + "\n" for n in range(20))
            headers = bearer(A) | {"content-type": "application/x-ndjson"}
            answer = await client.post("/v1/tasks/batch", content=body, headers=headers)
            assert answer.text.count('"accepted"') == 20
            answer = await client.post("/v1/tasks/batch", content=body, headers=headers)
            problem(answer, 429, "rate_limited")
            assert int(answer.headers["retry-after"]) > 1500

    async def test_sockets(self, path: Path) -> None:
        """Security 22: a socket over the limit is closed with 1013, whether its token is in the header or in the hello.

        A closed socket frees its place at once.
        """
        async with guarded(path) as it:
            async with it.worker("w1", "a", headers=bearer(A)):
                async with it.socket(additional_headers=bearer(B)) as late:
                    await asyncio.wait_for(late.wait_closed(), 30)
                    assert (late.close_code, late.close_reason) == (1013, "too_many")
                async with it.socket() as late:
                    hello = {"type": "hello", "worker_id": "w2", "keys": ["a"], "token": A}
                    await late.send(json.dumps(hello))
                    await asyncio.wait_for(late.wait_closed(), 30)
                    assert (late.close_code, late.close_reason) == (1013, "too_many")
                async with it.worker("w3", "a", token=ADMIN), it.worker("w4", "a", token=ADMIN):
                    pass
            await eventually(lambda: not it.context.usage._sockets)
            async with it.worker("w1", "a", token=B):
                assert it.context.usage._sockets == {"a": 1}
            await eventually(lambda: not it.context.usage._sockets)

    async def test_who_says_nothing_has_a_place(self, path: Path) -> None:
        """Security 22: a socket with a valid token in its header counts against the limit before it sends a hello."""
        async with guarded(path) as it, it.socket(additional_headers=bearer(A)) as silent:
            await eventually(lambda: it.context.usage._sockets)
            async with it.socket(additional_headers=bearer(A)) as late:
                await asyncio.wait_for(late.wait_closed(), 30)
                assert late.close_code == 1013
            await silent.close()
            await eventually(lambda: not it.context.usage._sockets)

    async def test_who_was_cut_off_comes_back_at_once(self, path: Path) -> None:
        """A broken connection frees its place before its grace is over.

        Otherwise the worker could not reconnect and adopt its running tasks.
        """
        async with guarded(path, grace=30) as it:
            async with it.worker("w1", "a", headers=bearer(A), credit=1) as worker:
                await it.publish("t1", key="a")
                [delivery] = await worker.deliveries(1)
                worker.socket.transport.abort()
                await eventually(lambda: not it.context.usage._sockets)
            held = [delivery["receipt"]]
            async with it.worker("w1", "a", headers=bearer(A), holding=held) as again:
                assert len(again.welcome["adopted"]) == 1
                await again.send("bye")
                await again.closed()

    async def test_sockets_of_prefect(self, path: Path) -> None:
        """Security 22: both websockets of a Prefect worker count.

        A socket over the limit is closed with 1013, "try again later".
        """
        async with guarded(path) as it:
            for where in (EVENTS, None):
                told = url_of(it, where) if where else url_of(it)
                async with Taker(told, quiet=True) as one:
                    await one.send("auth", token=A)
                    await eventually(lambda: it.context.usage._sockets)
                    for headers in (bearer(A), None):
                        async with Taker(told, quiet=True, headers=headers) as late:
                            # With a token in the header, the server refuses before the client sends anything.
                            with contextlib.suppress(ConnectionClosed):
                                await late.send("auth", token=A)
                            await asyncio.wait_for(late.socket.wait_closed(), 30)
                            assert late.socket.close_code == 1013
                await eventually(lambda: not it.context.usage._sockets)

    async def test_a_plugin_gives_limits(self) -> None:
        """The limits of an identity from a plugin are enforced like those from the token file."""
        plugin = Plugin(identity("good", rate=0.01, burst=2, connections=1))
        async with running(plugin.backend()) as it:
            assert await statuses(it, ["good"] * 3) == [200, 200, 429]
            async with (
                it.worker("w1", KEY, token="good"),
                it.socket(additional_headers=bearer("good")) as late,
            ):
                await asyncio.wait_for(late.wait_closed(), 30)
                assert late.close_code == 1013

    async def test_other_limits_end_nothing(self, path: Path) -> None:
        """If only the limits of a token change, a request that is waiting continues."""
        async with guarded(path) as it, http(it) as client:
            await it.publish("t1", key="a")
            asked = asyncio.create_task(client.get("/v1/tasks/a/t1?wait=5", headers=bearer(A)))
            await eventually(lambda: len(it.context.waiters))
            write(path, entry(A, "a", keys=["a"], rate=7))
            assert await it.context.access.reload()
            await it.context.control.cancel("a", "t1")
            it.context.waiters.check_now("a", "t1")
            assert (await asked).status_code == 200
