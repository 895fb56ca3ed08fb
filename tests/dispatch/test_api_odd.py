"""Tests of invalid and hostile requests: the answer names the error, repeats no value, and nothing is stored."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx2
import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.names import queue_of
from taskqueue_memory import MemoryBackend
from tests.dispatch.api import serving
from tests.dispatch.patience import until
from tests.dispatch.receivers import Script, answer, raw, receiving
from tests.dispatch.support import ledger_of
from tests.server.support import problem

CANARY = "s3cret-canary"
_REGISTER = {"model": "m", "server": "s", "endpoint": "http://127.0.0.1:1/x", "slots": 1}


_SUBMISSIONS: list[Any] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"priority": 10}, "priority"),
    ({"priority": -1}, "priority"),
    ({"priority": "9"}, "priority"),
    ({"deadline": -1}, "deadline"),
    ({"deadline": 1e300}, "deadline"),
    ({"expires_in": -1}, "expires_in"),
    ({"delay": 1, "not_before": 1}, "delay"),
    ({"tenant": f"{CANARY} x"}, "tenant"),
    ({"tenant": ""}, "tenant"),
    ({"idempotency_key": ""}, "idempotency_key"),
    ({"idempotency_key": "x" * 201}, "idempotency_key"),
    ({"callback_url": f"ftp://{CANARY}.example/"}, "callback_url"),
    ({"callback_url": f"https://{CANARY}@hook.example/"}, "callback_url"),
    ({"callback_url": "https://169.254.169.254/latest/meta-data"}, "callback_url"),
    ({"callback_url": "http://127.0.0.1/"}, "callback_url"),
    ({"callback_url": "https://localhost/"}, "callback_url"),
    ({"callback_url": "x" * 2001}, "callback_url"),
    ({"callback_url": 1}, "callback_url"),
    ({"unknown": CANARY}, "unknown"),
    ({f"{CANARY} x": 1}, None),
]


async def test_a_bad_submission() -> None:
    """A wrong submission is refused with its field but not its value, and not stored (security 7, 25, fault K2)."""
    async with serving(MemoryBackend()) as api, SimulatedGpu(name="a", mode=Mode.BUSY) as gpu:
        await api.register("zimg", gpu)
        for wrong, field in _SUBMISSIONS:
            for where, more in (("/queue/submit", {}), ("/tasks/handle", {"job_id": "j"})):
                told = {"model": "zimg"} | more | wrong
                refused = await api.client.post(where, json=told)
                problem(refused, 422, "invalid_input", field)
                assert CANARY not in refused.text
        assert (await ledger_of(api.dispatcher.backend, "zimg")).published == 0


_ENDPOINTS: list[Any] = [
    ({"slots": 0}, "slots"),
    ({"slots": LIMITS.slots + 1}, "slots"),
    ({"slots": 1.5}, "slots"),
    ({"slots": True}, "slots"),
    ({"together": 0}, "together"),
    ({"priority": 10}, "priority"),
    ({"server": ""}, "server"),
    ({"server": "a\nb"}, "server"),
    ({"endpoint": ""}, "endpoint"),
    ({"endpoint": "x" * 2001}, "endpoint"),
    ({"endpoint": "ftp://127.0.0.1/"}, "endpoint"),
    ({"endpoint": f"http://{CANARY}:x@127.0.0.1/"}, "endpoint"),
    ({"endpoint": "http://127.0.0.1/#x"}, "endpoint"),
    ({"endpoint": "http://8.8.8.8/"}, "endpoint"),
    ({"endpoint": "http://169.254.169.254/"}, "endpoint"),
    ({"reports": 1}, "reports"),
    ({"unknown": CANARY}, "unknown"),
]


async def test_a_bad_endpoint() -> None:
    """A wrong endpoint is refused before any request is sent to it (C12, security 7, fault K2)."""
    async with serving(MemoryBackend()) as api:
        for wrong, field in _ENDPOINTS:
            refused = await api.client.post("/admin/register", json=_REGISTER | wrong)
            problem(refused, 422, "invalid_input", field)
            assert CANARY not in refused.text
        assert await api.endpoints() == {}


_CONFIGURATIONS: list[Any] = [
    ({"model_type": CANARY}, "model_type"),
    ({"poll_interval": 0}, "poll_interval"),
    ({"poll_interval": "2"}, "poll_interval"),
    ({"poll_interval": True}, "poll_interval"),
    ({"poll_endpoint_template": "/status"}, "poll_endpoint_template"),
    ({"poll_endpoint_template": "/status/{id}/{0.__class__}"}, "poll_endpoint_template"),
    ({"poll_endpoint_template": f"http://{CANARY}/{{id}}"}, "poll_endpoint_template"),
    ({"poll_endpoint_template": "/größe/{id}"}, "poll_endpoint_template"),
    ({"health_path": "/health\r\nX-Evil: 1"}, "health_path"),
    ({"health_path": "/gesund heit"}, "health_path"),
    ({"health_path": "/größe"}, "health_path"),
    ({"health_path": "/health#top"}, "health_path"),
    ({"health_path": "health"}, "health_path"),
    ({"max_retries": 1000}, "max_retries"),
    ({"weights": {f"{CANARY} x": 1}}, "weights"),
    ({"weights": {CANARY: 0}}, "weights"),
    ({"floor_share": 0.6}, "floor_share"),
    ({CANARY: 1}, "config"),
    ([], "config"),
    ("text", "config"),
    (None, "config"),
]


async def test_a_bad_configuration() -> None:
    """A wrong configuration is refused, and the previous one stays in force (C13, fault K2, security 25)."""
    async with serving(MemoryBackend()) as api:
        path = "/admin/model-configs/zimg"
        await api.client.put(path, json={"poll_interval": 3})
        headers = {"content-type": "application/json"}
        for wrong, field in _CONFIGURATIONS:
            refused = await api.client.put(path, content=json.dumps(wrong), headers=headers)
            problem(refused, 422, "invalid_input", field)
            assert CANARY not in refused.text
            assert "pattern" not in refused.text
        assert (await api.client.get(path)).json()["poll_interval"] == 3


_PAYLOADS: list[Any] = [
    (b"", 400),
    (b"\xff", 400),
    (b'{"model":"zimg","payload":NaN}', 400),
    (b'{"model":"zimg","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"model":"zimg","payload":' + b"[" * 101 + b"]" * 101 + b"}", 422),
    (b'{"model":"zimg","payload":"' + b"x" * (LIMITS.payload - 1) + b'"}', 413),
    (b'{"model":"zimg","payload":"' + b"x" * 400_000 + b'"}', 413),
    (b'{"model":"zimg","payload":"' + b"x" * (LIMITS.payload - 2) + b'"}', 202),
    (b'{"model":"zimg","payload":' + b"[" * 100 + b"]" * 100 + b"}", 202),
]


async def test_payloads_at_their_limits() -> None:
    """A payload that is too large, too deep or not JSON is refused, and not repeated.

    The largest allowed payload is accepted (security 12).
    """
    async with serving(MemoryBackend()) as api, SimulatedGpu(name="a", mode=Mode.BUSY) as gpu:
        await api.register("zimg", gpu)
        headers = {"content-type": "application/json"}
        for body, status in _PAYLOADS:
            told = await api.client.post("/queue/submit", content=body, headers=headers)
            assert told.status_code == status, (body[:50], told.text[:500])
            assert "xxx" not in told.text
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            headers = {"content-type": kind}
            told = await api.client.post("/queue/submit", content=b"{}", headers=headers)
            assert told.status_code == 415


async def test_no_parameter_is_lost_by_a_typo() -> None:
    """An operation refuses query parameters that it does not know, such as misspelled ones (fault K2)."""
    async with serving(MemoryBackend()) as api:
        for where in ("/admin/dlq?modle=a", "/admin/endpoints?Limit=1", "/queue/jobs/a?wiat=1"):
            problem(await api.client.get(where), 422, "invalid_input", "query")
        for where in ("/admin/endpoints?limit=0", "/admin/dlq?limit=1001"):
            problem(await api.client.get(where), 422, "invalid_input", "limit")
        problem(await api.client.get("/admin/dlq?after=%20"), 422, "invalid_input", "after")
        for after in ("nowhere", "<5>nowhere-1", "ffffffffff", "-", "<x>", "0-0"):
            told = await api.client.get("/admin/dlq", params={"after": after})
            assert told.status_code in {200, 422}


_NO_JOBS = ["nowhere", "a b", "%2e%2e", "x" * 201, "0000000000-1", "a%2Fb"]


async def test_ids_of_no_job(backend: Backend) -> None:
    """A request for an unknown job gets 404, or 422 for a malformed id, and no other information (security 25)."""
    async with serving(backend) as api:
        for job_id in _NO_JOBS:
            for method, where in (
                ("GET", f"/queue/jobs/{job_id}"),
                ("GET", f"/queue/jobs/{job_id}/result?wait=5"),
                ("DELETE", f"/queue/jobs/{job_id}"),
                ("POST", f"/admin/dlq/{job_id}/retry"),
                ("DELETE", f"/admin/dlq/{job_id}"),
                ("GET", f"/admin/late/{job_id}"),
            ):
                told = await api.client.request(method, where)
                assert told.status_code in {404, 422}, (method, where, told.text)


async def test_an_expired_job_is_reported() -> None:
    """A job that was submitted by HTTP and expires calls back as well, with its status (C7, C26)."""
    async with receiving() as receiver:
        egress: dict[str, Any] = {
            "callback_http": True,
            "callback_networks": ("127.0.0.0/8",),
            "callback_ports": (receiver.port,),
        }
        async with (
            serving(MemoryBackend(), **egress) as api,
            SimulatedGpu(name="a", mode=Mode.BUSY) as gpu,
        ):
            await api.register("zimg", gpu)
            hook = f"http://127.0.0.1:{receiver.port}/hook"
            job_id = await api.submit("zimg", expires_in=0.2, callback_url=hook)
            assert (await api.state(job_id, wait=30))["state"] == "expired"
            await until(lambda: bool(receiver.calls))
        body = json.loads(receiver.calls[0].body)
        assert (body["job_id"], body["status"]) == (job_id, "expired")


@pytest.mark.parametrize(
    ("script", "state", "http_status"),
    [
        (answer(200, CANARY.encode(), x_secret=CANARY), "delivered", 200),
        (answer(410, CANARY.encode()), "failed", None),
        (answer(500, CANARY.encode(), x_secret=CANARY), "failed", None),
        (raw(f"HTTP/1.1 502 {CANARY}\r\n{CANARY}: x\r\n\r\n{CANARY}".encode()), "failed", None),
        (raw(f"{CANARY}\r\n\r\n".encode()), "failed", None),
        (answer(302, CANARY.encode(), location=f"http://{CANARY}.example/"), "failed", None),
    ],
    ids=["taken", "gone", "failed", "proxy", "garbage", "redirect"],
)
async def test_answers_of_receivers_are_never_echoed(
    script: Script, state: str, http_status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A job's status shows the callback's state and HTTP status, but not the response (OPEN-C7, C7, security 8, 15)."""
    caplog.set_level(logging.DEBUG)
    async with receiving(script) as receiver:
        hook = f"http://127.0.0.1:{receiver.port}/hook"
        egress: dict[str, Any] = {
            "callback_http": True,
            "callback_networks": ("127.0.0.0/8",),
            "callback_ports": (receiver.port,),
            "callback_attempts": 1,
        }
        async with (
            serving(MemoryBackend(), **egress) as api,
            SimulatedGpu(name="a", latency=0.001) as gpu,
        ):
            await api.register("zimg", gpu)
            job_id = await api.submit("zimg", {"n": 1}, callback_url=hook)
            assert (await api.state(job_id, wait=30))["state"] == "done"

            async def told() -> bool:
                callback = (await api.state(job_id))["callback"]
                return callback is not None and callback["state"] == state

            await until(told)
            shown = [
                await api.client.get(where)
                for where in (
                    f"/queue/jobs/{job_id}",
                    f"/queue/jobs/{job_id}/result",
                    "/admin/endpoints",
                    "/admin/dlq",
                    "/v1/queues/dispatch.callbacks/dead-letters",
                    "/metrics",
                )
            ]
            assert all(one.status_code == 200 for one in shown)
            assert not [one.url for one in shown if CANARY in one.text]
            assert shown[0].json()["callback"]["http_status"] == http_status
            body = json.loads(receiver.calls[0].body)
            assert (body["job_id"], body["status"]) == (job_id, "done")
        assert len(receiver.calls) == 1
    ours = [one for one in caplog.records if one.name.startswith("taskqueue")]
    assert ours
    logged = "".join(f"{one.getMessage()}{one.__dict__}" for one in ours)
    assert CANARY not in logged
    assert hook not in logged


async def test_clients_that_leave_while_they_wait(backend: Backend) -> None:
    """Clients that disconnect while waiting for a job leave no waiting request on the server (fault G1, E4)."""
    async with serving(backend) as api, SimulatedGpu(name="a", mode=Mode.BUSY) as gpu:
        await api.register("zimg", gpu)
        job_id = await api.submit("zimg")
        waiters = api.context.waiters
        async with httpx2.AsyncClient(base_url=api.url, trust_env=False, verify=False) as client:
            where = f"/queue/jobs/{job_id}?wait=30"
            waiting = [asyncio.create_task(client.get(where, timeout=60)) for _ in range(5)]
            await until(lambda: len(waiters) == 5)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: len(waiters) == 0)
        assert (await ledger_of(backend, "zimg")).published == 1
        assert queue_of("zimg") in await api.context.control.queues()
