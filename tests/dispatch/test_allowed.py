"""Tests of which endpoint URLs the settings allow, however the URL is spelled."""

from __future__ import annotations

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.endpoint_client.answers import EndpointUnreachable
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import settings


@pytest.mark.parametrize(
    "url",
    [
        "",
        "flux.example.com",
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "http://",
        "http:///generate",
        "http://user@127.0.0.1/",
        "http://user:secret@127.0.0.1/",
        "http://@127.0.0.1/",
        "http://127.0.0.1/#part",
        "http://127.0.0.1/#",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:x/",
        "http://127.0.0.1\\@8.8.8.8/",
        "http://127.0.0.1 /",
        "http://127.0.0.1\n/",
        " http://127.0.0.1/",
        "http://8.8.8.8/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:8.8.8.8]/",
        "http://[fe80::1%25eth0]/",
        "http://[::1/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://public.example/",
        "http://mixed.example/",
        "http://nowhere.example/",
        "http://127.0.0.1.public.example/",
        "http://gpu.example.com.evil.example/",
        "http://example.com/",
        "http://xexample.com/",
        "http://" + "a" * 64 + ".example.com/",
        "http://" + "a" * 2000,
    ],
)
async def test_endpoints_elsewhere(url: str) -> None:
    """An endpoint URL outside the allowed networks and hosts is refused, however the URL is spelled (C12)."""
    registry = ModelRegistry(MemoryBackend(), settings(endpoints_allowed=ALLOWED), resolve=told)
    with pytest.raises(InvalidInput) as caught:
        await registry.register("flux", "a", url, 1)
    assert caught.value.field in {"endpoint", "url"}
    assert "secret" not in str(caught.value)
    assert await registry.models() == ()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/generate",
        "https://10.1.2.3/",
        "http://[fd00::1]:8000/v1",
        "http://[::ffff:10.0.0.1]/",
        "http://gpu.example.com/generate?x=1",
        "http://GPU.Example.COM./",
        "https://a.b.example.com:8443/",
        "http://inside.example/",
    ],
)
async def test_endpoints_that_are_allowed(url: str) -> None:
    """Networks, hosts, hosts below a name, and hosts whose addresses are all within the networks are allowed (C12)."""
    registry = ModelRegistry(MemoryBackend(), settings(endpoints_allowed=ALLOWED), resolve=told)
    assert (await registry.register("flux", "a", url, 1)).endpoint.url == url


ALLOWED = ("127.0.0.0/8", "10.0.0.0/8", "fd00::/8", "gpu.example.com", "*.Example.com")
ADDRESSES = {
    "public.example": ("8.8.8.8",),
    "mixed.example": ("10.0.0.1", "8.8.8.8"),
    "inside.example": ("10.0.0.1", "fd00::1"),
}


async def told(host: str) -> tuple[str, ...]:
    """Resolve host names as an untrusted name server would."""
    return ADDRESSES.get(host, ())


async def test_the_systems_resolver() -> None:
    """Host names are resolved by the operating system, and a name that it does not know is refused (C12)."""
    registry = ModelRegistry(MemoryBackend(), settings())
    await registry.register("flux", "a", "http://localhost:8000/", 1)
    with pytest.raises(InvalidInput, match="cannot be resolved"):
        await registry.register("flux", "b", "http://nowhere.invalid/", 1)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.4:9000/", "http://192.168.0.1/", "http://[fd00::1]/"]
)
async def test_only_this_machine_until_more_is_named(url: str) -> None:
    """Without a setting, endpoints may be registered and called on loopback only (row A6)."""
    told = settings()
    registry = ModelRegistry(MemoryBackend(), told)
    with pytest.raises(InvalidInput, match="TASKQUEUE_DISPATCH_ENDPOINTS_ALLOWED"):
        await registry.register("flux", "a", url, 1)
    for own in ("http://127.0.0.1:1/", "http://[::1]:1/"):
        await registry.register("flux", "a", own, 1)
    # An endpoint that was registered while the settings allowed its address is not called either.
    caller = EndpointClient(told)
    answer = await caller.ask(url, "r-1", ModelConfig(poll_endpoint_template="/status/{id}"))
    await caller.aclose()
    assert isinstance(answer, EndpointUnreachable)
    assert "not allowed" in answer.error
