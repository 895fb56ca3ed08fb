"""Tests of many callbacks at once, and of stopping the sender."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Order, control_of
from taskqueue_core.consumer.settle import settle
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.tasks import Task
from taskqueue_dispatch.callbacks import receivers
from taskqueue_dispatch.callbacks.sender import Sender
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_memory import MemoryBackend
from tests.dispatch.calling_back import CANARY, QUICK, ended, failed_once, ids, job_for, quick, tell
from tests.dispatch.patience import eventually
from tests.dispatch.receivers import (
    OK,
    Receiver,
    answer,
    fixed,
    hang,
    raw,
    receiving,
    sending,
    settings,
)
from tests.redis.backends import housekept


class TestMany:
    """Many callbacks at the same time."""

    async def test_at_least_once_and_one_end(self, backend: Backend) -> None:
        """Each callback is sent at least once, always with the same id, and has one end. The ledger balances (R15)."""
        await quick(backend)
        chosen = random.Random(7)
        kinds = [answer(500), answer(503), raw(b""), answer(410), OK, OK, OK]
        async with (
            receiving(*chosen.choices(kinds, k=400), OK) as receiver,
            housekept(backend),  # type: ignore[arg-type] # any backend has what it uses
        ):
            jobs = [job_for(receiver, f"j{number}") for number in range(60)]
            told = settings(receiver, callback_attempts=4, callbacks_per_host=8)
            async with sending(backend, told) as sender:
                await tell(backend, *jobs)
                records = await ended(sender, *jobs)
        assert {record.state for record in records} <= {"delivered", "failed"}
        assert ids(receiver.calls) == {record.webhook_id for record in records}
        by_id = {job.id: record for job, record in zip(jobs, records, strict=True)}
        assert len({record.webhook_id for record in by_id.values()}) == 60
        for record in records:
            calls = [
                one for one in receiver.calls if one.headers["webhook-id"] == record.webhook_id
            ]
            assert len(calls) == record.attempt
        ledger = await control_of(backend).ledger(CALLBACKS)
        assert (ledger.published, ledger.done + ledger.dead, ledger.imbalance) == (60, 60, 0)

    async def test_hosts_in_turn(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A host that hangs gets at most four calls at a time, and does not delay other hosts (C7, Security 22)."""
        monkeypatch.setattr("taskqueue_dispatch.callbacks.sender._GRACE_SECONDS", 0.05)
        async with receiving(hang) as slow, receiving() as swift:
            names = fixed(slow="127.0.0.1", swift="127.0.0.1")
            stuck = [job_for(slow, f"s{n}", host="slow.example") for n in range(30)]
            others = [job_for(swift, f"o{n}", host="swift.example") for n in range(10)]
            async with sending(backend, settings(slow, swift), resolve=names) as sender:
                await tell(backend, *stuck)
                await eventually(lambda: slow.open == 4)
                await tell(backend, *others)
                records = await ended(sender, *others)
                assert slow.open == slow.most == 4
                assert slow.touched == 4
        assert {record.state for record in records} == {"delivered"}

    async def test_so_many_at_once(self) -> None:
        """A sender never has more calls open than ``callbacks_at_once`` (Security 12)."""
        backend = MemoryBackend()
        async with receiving(hang) as receiver:
            names = fixed(**{f"h{number}": "127.0.0.1" for number in range(9)})
            jobs = [job_for(receiver, f"j{n}", host=f"h{n}.example") for n in range(9)]
            told = settings(receiver, callbacks_at_once=3, callback_timeout=0.3)
            async with sending(backend, told, resolve=names) as sender:
                await tell(backend, *jobs)
                await eventually(lambda: receiver.touched == 9)
                assert receiver.most == 3
                assert len(sender._sending) <= 3
        await backend.aclose()


class TestHanging:
    """990 callbacks to 99 hosts that hang, which any client can request, and callbacks of others (row C7)."""

    async def test_of_one_tenant(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tenant has a quarter of the places, so the callbacks of another tenant are sent at once."""
        monkeypatch.setattr("taskqueue_dispatch.callbacks.sender._GRACE_SECONDS", 0.05)
        async with receiving(hang) as slow, receiving() as swift:
            stuck, names = self.stuck(slow, "attacker")
            others = [
                job_for(swift, f"o{n}", host="swift.example", tenant="other") for n in range(40)
            ]
            async with sending(backend, settings(slow, swift), resolve=names) as sender:
                await tell(backend, *stuck)
                await eventually(lambda: slow.open == 16)
                await tell(backend, *others)
                records = await ended(sender, *others)
                assert slow.most == 16
        assert {(record.state, record.attempt) for record in records} == {("delivered", 1)}

    async def test_of_many_tenants(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests that hang are cut off while all places are taken, and then have a quarter of the places.

        A callback that is only postponed uses up none of its attempts.
        """
        monkeypatch.setattr("taskqueue_dispatch.callbacks.sender._GRACE_SECONDS", 0.05)
        monkeypatch.setattr(receivers, "PATIENCE_SECONDS", 0.2)
        async with receiving(hang) as slow, receiving() as swift:
            stuck, names = self.stuck(slow, None)
            others = [job_for(swift, f"o{n}", host="swift.example") for n in range(40)]
            told = settings(slow, swift, callback_attempts=1, callback_timeout=1)
            async with sending(backend, told, resolve=names) as sender:
                await tell(backend, *stuck)
                await eventually(lambda: slow.open == 64)
                touched = slow.touched
                await tell(backend, *others)
                records = await ended(sender, *others)
                assert {(record.state, record.attempt) for record in records} == {("delivered", 1)}
                assert slow.touched - touched <= 2 * 99, "each host that hangs had a turn or two"
                control = control_of(backend)
                await eventually(lambda: slow.open <= 16)
                ledger = await control.ledger(CALLBACKS)
                assert ledger.dead <= slow.touched
                assert ledger.dead + slow.open < 990
            assert slow.most == 64

    def stuck(self, slow: Receiver, tenant: str | None) -> tuple[list[Task], Any]:
        """Return ten jobs with callbacks to each of 99 hosts, and a resolver for these hosts and the swift one."""
        hosts = [f"h{number}" for number in range(99)]
        jobs = [
            job_for(slow, f"{host}-{n}", host=f"{host}.example", tenant=tenant)
            for n in range(10)
            for host in hosts
        ]
        return jobs, fixed(swift="127.0.0.1", **dict.fromkeys(hosts, "127.0.0.1"))


class TestStopping:
    """What happens to callbacks when the sender is stopped."""

    async def test_what_is_sent_may_end(self, backend: Backend) -> None:
        """A stopping sender waits for calls in progress, so that they are not sent twice (R15)."""
        go = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await go.wait()
            await OK(reader, writer)

        async with receiving(slow) as receiver:
            job = job_for(receiver)
            sender = Sender(backend, settings(receiver))
            running = asyncio.create_task(sender.run())
            await tell(backend, job)
            await eventually(lambda: receiver.calls)
            running.cancel()
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            record = await sender.record(job.id)
        assert record is not None
        assert (record.state, len(receiver.calls)) == ("delivered", 1)

    async def test_not_for_ever(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A call that hangs is released, not counted as lost, and the next sender sends it with the same id (R15)."""
        monkeypatch.setattr("taskqueue_dispatch.callbacks.sender._GRACE_SECONDS", 0.05)
        async with receiving(hang, OK) as receiver:
            job = job_for(receiver)
            async with sending(backend, settings(receiver)):
                await tell(backend, job)
                await eventually(lambda: receiver.calls)
            async with sending(backend, settings(receiver)) as sender:
                (record,) = await ended(sender, job)
            (status,) = await control_of(backend).statuses(CALLBACKS, record.webhook_id)
        assert status is not None
        assert (record.state, status.attempt, status.losses) == ("delivered", 1, 0)
        assert len(receiver.calls) == 2
        assert ids(receiver.calls) == {record.webhook_id}


class TestSettings:
    """The settings of the callback queue, and invalid settings of the sender."""

    async def test_set_up(self, backend: Backend) -> None:
        """The sender configures the callback queue when it starts.

        It overwrites only the settings that belong to the dispatcher, so that an operator's changes stay (C7).
        """
        control = control_of(backend)

        async def ready() -> bool:
            return (await control.settings(CALLBACKS)).retry.max_attempts == 12

        async with sending(backend, settings()):
            await eventually(ready)
        first = await control.settings(CALLBACKS)
        assert (first.order, first.tenant_max_inflight) == (Order.FAIR, 16)
        assert (first.retry.base, first.result_ttl, first.version) == (5.0, 86_400.0, 1)
        async with receiving() as receiver, sending(backend, settings(receiver)) as sender:
            await tell(backend, job_for(receiver))
            await ended(sender, job_for(receiver))
        assert await control.settings(CALLBACKS) == first
        changed = first.model_copy(update={"result_ttl": 60.0, "retry": QUICK})
        await control.configure(CALLBACKS, changed)
        async with sending(backend, settings(callbacks_at_once=8)):
            await eventually(ready)
        last = await control.settings(CALLBACKS)
        assert (last.result_ttl, last.retry.base, last.tenant_max_inflight) == (60.0, 0.01, 4)

    @pytest.mark.parametrize(
        "wrong",
        [{"webhook_secrets": ("secret",)}, {"callback_networks": ("x",)}, {"callback_ports": (0,)}],
    )
    async def test_wrong_ones(self, wrong: dict[str, Any]) -> None:
        """An invalid setting raises an error when the sender is created (OPEN-C7)."""
        with pytest.raises(ConfigurationError, match="TASKQUEUE_DISPATCH_"):
            Sender(MemoryBackend(), settings(**wrong))


async def test_an_error_in_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error fails one attempt of one callback, and is neither logged nor stored (Security 15)."""

    async def breaks(host: str, _port: int) -> tuple[str, ...]:
        raise RuntimeError(host)

    backend = MemoryBackend()
    async with receiving() as receiver:
        job, other = job_for(receiver, host=f"{CANARY}.example"), job_for(receiver, "two")
        async with sending(backend, settings(receiver), resolve=breaks) as sender:
            await tell(backend, job, other)
            assert (await failed_once(sender, job)).error == "internal error of the callback sender"
            assert (await ended(sender, other))[0].state == "delivered"
    assert CANARY not in caplog.text
    assert (await backend.control.ledger(CALLBACKS)).in_flight == 0
    await backend.aclose()


async def test_a_settlement_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback whose settlement fails delays no others, and is sent again by the next sender (R15)."""
    backend = MemoryBackend()
    fails = [True]

    async def settles(*arguments: Any) -> Any:
        if fails:
            fails.pop()
            raise InvalidInput("result", "another", "none")
        return await settle(*arguments)

    monkeypatch.setattr("taskqueue_dispatch.callbacks.sender.settle", settles)
    async with receiving() as receiver:
        job, other = job_for(receiver), job_for(receiver, "two")
        async with sending(backend, settings(receiver)) as sender:
            await tell(backend, job)
            await eventually(lambda: receiver.calls)
            await tell(backend, other)
            assert (await ended(sender, other))[0].state == "delivered"
        async with sending(backend, settings(receiver)) as sender:
            assert (await ended(sender, job))[0].state == "delivered"
    assert len(ids(receiver.calls)) == 2
    await backend.aclose()
