"""Tests of the callbacks that report the end of jobs."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Endpoint, control_of
from taskqueue_core.consumer import maintenance
from taskqueue_dispatch.callbacks import sender
from taskqueue_dispatch.callbacks.tasks import callback_id
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.status import JobState
from tests.dispatch import receivers
from tests.dispatch.patience import until
from tests.dispatch.receivers import Receiver, receiving
from tests.dispatch.support import dispatching, ended, send, serve

SIGNED = "whsec_" + "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"


def calling(receiver: Receiver) -> dict[str, object]:
    """Return settings that allow a dispatcher to call the receiver with signed callbacks."""
    told = receivers.settings(receiver, webhook_secrets=(SIGNED,))
    names = {"callback_http", "callback_networks", "callback_ports", "webhook_secrets"}
    return told.model_dump(include=names)


def bodies(receiver: Receiver) -> list[dict[str, object]]:
    """Return the bodies of the callbacks that the receiver has got."""
    return [msgspec.json.decode(call.body) for call in receiver.calls]


async def test_done_and_failed(backend: Backend) -> None:
    """A client is notified of a result, and of a failure with its error; the ledger counts both (C7, C26, OPEN-C7)."""
    async with (
        receiving() as receiver,
        SimulatedGpu(name="a", slots=1, latency=0.001) as gpu,
        dispatching(backend, **calling(receiver)) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=ModelConfig(max_retries=0))
        url = f"http://127.0.0.1:{receiver.port}/done"
        (done,) = await send(dispatcher, "flux", callback_url=url)
        await ended(dispatcher, [done])
        gpu.mode = Mode.FAIL
        (failed,) = await send(dispatcher, "flux", callback_url=url)
        await ended(dispatcher, [failed], JobState.FAILED)
        await until(lambda: len(receiver.calls) == 2)

        async def accounted() -> bool:
            ledger = await control_of(backend).ledger(CALLBACKS)
            return ledger.balanced and ledger.published == ledger.done == 2

        await until(accounted)
    first, second = bodies(receiver)
    assert (first["job_id"], first["status"]) == (done, "done")
    assert first["result"] == {"server": "a", "job_id": done, "attempt": 1}
    assert (second["job_id"], second["status"]) == (failed, "failed")
    assert second["error"]


async def test_a_slot_does_not_wait_for_its_callback(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback receiver that hangs delays neither jobs nor the release of slots (C7, fault I2)."""
    # shortens the wait for hanging calls at the end of the test
    monkeypatch.setattr(sender, "_GRACE_SECONDS", 0.1)
    async with (
        receiving(receivers.hang) as receiver,
        SimulatedGpu(name="a", slots=1, latency=0.001) as gpu,
        dispatching(backend, **calling(receiver)) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        url = f"http://127.0.0.1:{receiver.port}/"
        ids = await send(dispatcher, "flux", 20, callback_url=url)
        await ended(dispatcher, ids)
        await until(lambda: receiver.open > 0)
        view = await dispatcher.pool.inspect("flux")
        assert view.endpoints[0].assigned == 0


async def test_an_expiry_is_reported(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is notified once that its job has expired in the queue (C26, fault F12)."""
    monkeypatch.setattr(sender, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(maintenance, "_EVERY", 0.2)
    async with (
        receiving() as receiver,
        dispatching(backend, **calling(receiver)) as dispatcher,
    ):
        await dispatcher.pool.register(
            Endpoint(model="flux", server="away", url="http://127.0.0.1:9/", slots=1)
        )
        await dispatcher.registry.refresh()
        url = f"http://127.0.0.1:{receiver.port}/"
        ids = await send(dispatcher, "flux", callback_url=url, deadline=backend.now() + 0.1)
        await ended(dispatcher, ids, JobState.EXPIRED)
        await until(lambda: len(receiver.calls) == 1)
        assert bodies(receiver)[0]["status"] == "expired"
        record = await dispatcher.sender.record(ids[0])
        assert record is not None
        assert record.job_status == "expired"


@pytest.mark.parametrize("late", [False, True])
async def test_one_end_is_reported(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """Only the actual end of a job is reported; a job that runs past its deadline may be done or expired (C26)."""
    monkeypatch.setattr(sender, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(maintenance, "_EVERY", 0.1)
    async with (
        receiving() as receiver,
        SimulatedGpu(name="a", slots=1, latency=0.4 if late else 0.001) as gpu,
        dispatching(backend, **calling(receiver)) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        url = f"http://127.0.0.1:{receiver.port}/"
        deadline = backend.now() + (0.2 if late else 60)
        ids = await send(dispatcher, "flux", callback_url=url, deadline=deadline)
        await until(lambda: len(receiver.calls) == 1)
        told = str(bodies(receiver)[0]["status"])
        assert told in ({"done", "expired"} if late else {"done"})
        await ended(dispatcher, ids, JobState(told))
        record = await dispatcher.sender.record(ids[0])
        assert record is not None
        assert record.job_status == told
        watch = callback_id(ids[0], "expired")

        async def watched_no_more() -> bool:
            (seen,) = await control_of(backend).statuses(CALLBACKS, watch)
            return seen is not None and not seen.state.live

        await until(watched_no_more)
    assert len(receiver.calls) == 1


async def test_the_watch_sends_a_missing_callback(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is notified even if the dispatcher is killed before it publishes the callback.

    Here it has settled a late job (C26).
    """
    monkeypatch.setattr(sender, "_POLL_SECONDS", 0.1)
    # the job is done before maintenance could let it expire
    monkeypatch.setattr(maintenance, "_EVERY", 60)
    late = asyncio.Event()

    async def sleep(_: float) -> None:
        await late.wait()

    async with (
        receiving() as receiver,
        SimulatedGpu(name="a", slots=1, sleep=sleep) as gpu,
        dispatching(backend, **calling(receiver)) as dispatcher,
    ):

        async def silent(*_: object) -> None:
            """Publish no callback, as a killed dispatcher would not."""

        dispatcher.report = silent  # type: ignore[method-assign, assignment]
        await serve(dispatcher, "flux", gpu)
        url = f"http://127.0.0.1:{receiver.port}/"
        deadline = backend.now() + 1
        ids = await send(dispatcher, "flux", callback_url=url, deadline=deadline)
        await until(lambda: gpu.active == 1)
        await until(lambda: backend.now() > deadline)
        late.set()
        await ended(dispatcher, ids)
        await until(lambda: len(receiver.calls) == 1)
        assert bodies(receiver)[0]["status"] == "done"
        assert bodies(receiver)[0]["result"] is not None
