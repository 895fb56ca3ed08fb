"""Tests of callbacks as tasks: payload, id, headers and tenant."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task
from taskqueue_dispatch.callbacks.sender import policy_of
from taskqueue_dispatch.callbacks.tasks import ENDS, callback_task
from taskqueue_dispatch.names import CALLBACKS, job_id, queue_of
from tests.dispatch.receivers import settings

URL = "https://hooks.example/a?b=c"


def job(url: str | None = URL, **fields: Any) -> Task:
    """Return a job that was submitted with a callback URL."""
    headers = {"model": "m"} | ({} if url is None else {"callback-url": url})
    told = {"id": job_id("m", "one"), "payload": b'{"canary": 1}', "tenant": "t"} | fields
    return Task(key=queue_of("m"), headers=headers, **told)


def test_what_it_says() -> None:
    """The payload is {job_id, status, result}; it contains nothing of the job's payload, model or tenant (C7)."""
    task = callback_task(job(), "done", b'{"a": [1.50]}', None)
    assert task.key == CALLBACKS
    assert task.payload == b'{"job_id":"%s","status":"done","result":{"a": [1.50]}}' % (
        job().id.encode()
    )
    assert task.headers == {"callback-url": URL}
    assert task.tenant == "t"


def test_failures() -> None:
    """The callback of a failed job has a null result and an error of at most 1000 characters (C7)."""
    task = callback_task(job(), "failed", None, "no " * 5000)
    told = msgspec.json.decode(task.payload)
    assert told == {
        "job_id": job().id, "status": "failed", "result": None, "error": ("no " * 5000)[:1000]
    }  # fmt: skip
    assert callback_task(job(), "failed", None, "half \ud800").value()["error"] == "half ?"


@pytest.mark.parametrize("status", ENDS)
def test_ids(status: str) -> None:
    """The callback's id depends on the job and its end, not on the result, and contains no dot (R15, fault I4)."""
    one = callback_task(job(), status, b"1", None)
    assert one.id == callback_task(job(), status, b"2", "x").id
    assert "." not in one.id
    others = {callback_task(job(), other, b"1", None).id for other in ENDS}
    others |= {callback_task(job(id=name), status, b"1", None).id for name in ("a", "a.b", "<x")}
    assert len(others) == len(ENDS) + 3
    assert not any("." in other for other in others)


def test_large_results() -> None:
    """A result that makes the payload exceed 20 kB is omitted, and the payload says so (Security 9, 12)."""
    around = len(callback_task(job(), "done", b'""', None).payload)
    fits = b'"' + b"x" * (20_000 - around) + b'"'
    whole = callback_task(job(), "done", fits, None)
    assert len(whole.payload) == 20_000
    assert "result_omitted" not in whole.value()
    told = callback_task(job(), "done", fits[:-1] + b'x"', None).value()
    assert told == {"job_id": job().id, "status": "done", "result": None, "result_omitted": True}


@pytest.mark.parametrize(
    "result",
    [b"[" * LIMITS.depth + b"]" * LIMITS.depth, b"", b"no", b'1,"status":"failed"', b"\xff", b"1e999x"],
)  # fmt: skip
def test_odd_results(result: bytes) -> None:
    """A result that is not valid JSON, or too deep, is omitted and cannot change other fields (Security 9)."""
    told = callback_task(job(), "done", result, None).value()
    assert told == {"job_id": job().id, "status": "done", "result": None, "result_omitted": True}


@pytest.mark.parametrize(
    ("url", "tenant"),
    [
        ("https://Hooks.Example:8443/x", "hooks.example"),
        ("https://[2606:2800:21f:cb07::1]/", "<2606:2800:21f:cb07::1>"),
        ("https://93.184.215.14/", "93.184.215.14"),
        ("https://user@hooks.example/", "unreadable"),
        ("nothing", "unreadable"),
    ],
)
def test_tenants(url: str, tenant: str) -> None:
    """A callback has the tenant of its job, or else its host, even if the URL is invalid (C7, OPEN-C7)."""
    assert callback_task(job(url, tenant=None), "done", b"1", None).tenant == tenant
    assert callback_task(job(url), "done", b"1", None).tenant == "t"


def test_a_long_host() -> None:
    """Hosts that are longer than a tenant's name may be still get different tenants (C7)."""
    hosts = [".".join(["a" * 60] * 3 + ["b" * 60, end]) for end in ("one", "two")]
    jobs = [job(f"https://{host}/", tenant=None) for host in hosts]
    tenants = {callback_task(one, "done", b"1", None).tenant for one in jobs}
    assert len(tenants) == 2


def test_what_it_needs() -> None:
    """A job without a callback URL and an unknown status raise `InvalidInput` (C7)."""
    with pytest.raises(InvalidInput, match="callback-url"):
        callback_task(job(None), "done", b"1", None)
    with pytest.raises(InvalidInput, match="done, failed"):
        callback_task(job(), "running", None, None)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("callback_networks", ("10.0.0.1/8",)),
        ("callback_networks", ("hooks.example",)),
        ("callback_ports", (0,)),
        ("callback_ports", (65_536,)),
    ],
)
def test_settings_that_are_none(setting: str, value: object) -> None:
    """An invalid setting is refused when the dispatcher starts, and the error names it (OPEN-C7)."""
    with pytest.raises(ConfigurationError, match=setting.upper()):
        policy_of(settings(**{setting: value}))
