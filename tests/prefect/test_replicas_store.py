"""Tests of how Prefect replicas use their store: connections, queues and dead letters."""

from __future__ import annotations

from contextlib import AsyncExitStack

from taskqueue_core.tasks import Ledger, State
from taskqueue_prefect.names import RECEIVER, client_of
from taskqueue_redis import RedisBackend
from tests.prefect.replicas import GRACE, SECONDS, Replica, Site, key
from tests.prefect.support import Taker
from tests.server.support import eventually

Pair = tuple[Replica, Replica]
SOCKETS, EACH = 60, 5


async def test_connections_do_not_grow(pair: Pair, site: Site, backend: RedisBackend) -> None:
    """Row OPEN-E2: sixty sockets with five keys each need no more connections to Redis than two sockets."""

    def connections() -> int:
        return len(site.redis.call("CLIENT", "LIST").splitlines())

    names = [key() for _ in range(EACH)]
    async with AsyncExitStack() as ending:

        async def subscribed(numbers: range) -> int:
            for number in numbers:
                worker = Taker(pair[number % 2].socket, *names, client_id=f"w-{number}")
                await ending.enter_async_context(worker)

            async def all_known() -> bool:
                names = [client_of(one.worker_id) for one in await backend.control.workers()]
                return sum(name != RECEIVER for name in names) == numbers.stop

            await eventually(all_known, 30)
            return connections()

        few = await subscribed(range(2))
        assert await subscribed(range(2, SOCKETS)) < few + EACH


async def test_one_at_a_time_of_many_keys(pair: Pair, backend: RedisBackend) -> None:
    """Rows OPEN-E1, E2: a worker of several tasks holds one run.

    Each task has a queue, and the run returns to its own queue.
    """
    a, b = pair
    names = [key() for _ in range(EACH)]
    runs = {a.created(name): name for name in names for _ in range(2)}

    async def books() -> dict[str, Ledger]:
        return {name: await backend.control.ledger(name) for name in names}

    async with Taker(b.socket, *names) as taker:
        found = await taker.receive()
        held = runs[found["id"]]
        for name, one in (await books()).items():
            assert (one.waiting, one.in_flight) == ((1, 1) if name == held else (2, 0))
        assert set(names) <= set(await backend.control.queues())
        await taker.send("quit")

    async def all_there() -> bool:
        return all((one.waiting, one.in_flight) == (2, 0) for one in (await books()).values())

    await eventually(all_there)


async def test_a_run_that_servers_vanish_with(pair: Pair, backend: RedisBackend) -> None:
    """Rows E6, E8: a run lost with more servers than ``max_losses`` allows becomes a dead letter.

    It is not sent again.
    """
    a, b = pair
    name = key()
    run, other = b.created(name), b.created(key())
    settings = await backend.control.settings(name)
    assert settings.max_losses == 5
    await backend.control.configure(name, settings.model_copy(update={"max_losses": 0}))

    async def is_dead() -> bool:
        (status,) = await backend.control.statuses(name, run)
        return status is not None and (status.state, status.losses) == (State.DEAD, 1)

    async with Taker(a.socket, name) as taker:
        assert (await taker.receive())["id"] == run
        a.freeze()  # frozen for longer than the lease, which is like a crash
        try:
            await eventually(is_dead, SECONDS)
        finally:
            a.thaw()
    async with Taker(b.socket, name) as taker:
        await taker.nothing_comes(2 * GRACE)  # the reconciler does not publish it again either
    assert (await backend.control.ledger(name)).dead == 1
    assert {b.state(one) for one in (run, other)} == {"Scheduled"}
