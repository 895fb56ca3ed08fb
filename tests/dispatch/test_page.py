"""Tests of the dashboard's page about the dispatcher, with a real server and a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from taskqueue_core.backend import Backend
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import Identity
from taskqueue_dispatch.api import extension
from taskqueue_dispatch.dashboard import snapshot
from taskqueue_dispatch.dashboard.pages import PAGES
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth import access
from taskqueue_server.dashboard import poller
from taskqueue_server.dashboard.pages import path
from tests.dashboard.support import PAGE, Gate, browsing, looking, post
from tests.dispatch.patience import until
from tests.dispatch.support import send, serve, settings
from tests.server.support import Running, http, running

MODEL = "acme/flux <b>bold</b>"
"""contains HTML and a slash, because a model may have any name"""
_LONG = 30.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take samples five times a second, so that no test waits long for the next one."""
    monkeypatch.setattr(poller, "_SECOND", 0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Start one browser for all tests of this file, because a start is slow."""
    async with browsing() as browser:
        yield browser


@asynccontextmanager
async def dispatching(backend: Backend | None = None) -> AsyncIterator[tuple[Running, Dispatcher]]:
    """Run a server with a dispatcher, and yield both."""
    async with running(backend or MemoryBackend(), extensions=[extension(settings())]) as it:
        yield it, cast("Dispatcher", it.context.extension_state["dispatch"])


async def shown(it: Running, where: str = "/dispatch") -> str:
    """Return a page's HTML, as a browser without JavaScript gets it."""
    async with http(it) as client:
        answer = await client.get(where, headers=PAGE)
        assert answer.status_code == 200, answer.text
        return answer.text


async def test_what_it_shows(backend: Backend) -> None:
    """The page shows models with their queues, endpoints with their slots, and running jobs (C12, B8)."""
    async with dispatching(backend) as (it, dispatcher):
        empty = await shown(it)
        assert "No model yet" in empty
        assert "taskqueue dispatch register" in empty
        async with SimulatedGpu(name="gpu-1", slots=2, latency=_LONG) as gpu:
            await serve(dispatcher, MODEL, gpu)
            job, *_ = await send(dispatcher, MODEL, 3)
            await until(lambda: gpu.active == 2)
            text = await shown(it)
            assert "<b>bold" not in text
            assert f'href="{path("queues", queue_of(MODEL))}"' in text
            assert gpu.url in text
            assert f">{job}</a>" in text
            named = "acme/flux &lt;b&gt;bold&lt;/b&gt;"
            first = f"e.{len(MODEL)}.{named}/gpu-1"
            for name, value in {
                f"m.{named}.state": "ready",
                f"m.{named}.slots": "0 of 2",
                f"m.{named}.queued": "1",
                f"m.{named}.capacity": "200",
                f"m.{named}.running": "2",
                f"{first}.state": "ready",
                f"{first}.marks": "■■",
                f"{first}.free": "0",
                f"{first}.assigned": "2",
                f"j.{job}.state": "assigned",
            }.items():
                assert _live(text, name) == value, name


def _live(text: str, name: str) -> str:
    """Return the value of a figure in the page's HTML by its name."""
    _, found, rest = text.partition(f'data-live="{name}"')
    assert found, name
    return rest.partition(">")[2].partition("<")[0]


async def test_the_way_there() -> None:
    """Every page links to the dispatcher's page if the server has a dispatcher, and otherwise none does."""
    async with dispatching() as (it, _):
        assert '<a href="/dispatch">Dispatch</a>' in await shown(it, "/")
        assert '<a href="/dispatch" aria-current="page">Dispatch</a>' in await shown(it)
    async with running() as it, http(it) as client:
        assert "/dispatch" not in (await client.get("/", headers=PAGE)).text
        assert (await client.get("/dispatch", headers=PAGE)).status_code == 404


@pytest.mark.asyncio(loop_scope="module")
async def test_it_moves_by_itself(browser: Browser) -> None:
    """An open page shows new endpoints and jobs, and their progress, without being reloaded (C19)."""
    async with dispatching() as (it, dispatcher), looking(browser, it, "/dispatch") as page:
        await expect(page.locator("#connection b")).to_have_text("Live")
        await page.evaluate("window.kept = true")
        async with SimulatedGpu(name="gpu-1", latency=_LONG) as gpu:
            await serve(dispatcher, "flux", gpu)
            row = page.locator("#endpoints tr", has_text="gpu-1")
            await expect(row.locator(".state")).to_have_text("ready")
            job, *_ = await send(dispatcher, "flux", 2)
            await expect(_figure(page, "e.4.flux/gpu-1.assigned")).to_have_text("1")
            await expect(_figure(page, "m.flux.queued")).to_have_text("1")
            await expect(page.locator("#running")).to_contain_text(job)
            await gpu.crash()
            await expect(row.locator(".state")).to_have_text("not healthy")
            await expect(row.locator(".state")).to_have_attribute("data-state", "bad")
            gpu.latency = 0.01
            await gpu.start()
            await expect(_figure(page, "m.flux.done")).to_have_text("2")
            await expect(page.locator("#running")).to_contain_text("No running jobs")
        assert await page.evaluate("window.kept")


def _figure(page: Page, name: str) -> Locator:
    return page.locator(f'[data-live="{name}"]')


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
async def test_drain_use_again_and_remove(browser: Browser, *, scripts: bool) -> None:
    """An endpoint can be drained, used again and removed on the page, with and without JavaScript (C12)."""
    async with (
        dispatching() as (it, dispatcher),
        SimulatedGpu(name="gpu-1") as gpu,
        looking(browser, it, "/dispatch", java_script_enabled=scripts) as page,
    ):
        await serve(dispatcher, MODEL, gpu)
        await page.reload()
        await page.get_by_role("button", name=f"Drain gpu-1 for {MODEL}").click()
        await expect(page.locator("#said")).to_contain_text("Draining")
        (info,) = (await dispatcher.pool.inspect()).endpoints
        assert info.draining
        await page.get_by_role("button", name=f"Use gpu-1 for {MODEL} again").click()
        await expect(page.locator("#said")).to_contain_text("In use again")
        (info,) = (await dispatcher.pool.inspect()).endpoints
        assert not info.draining
        await page.get_by_role("button", name=f"Drain gpu-1 for {MODEL}").click()
        await page.get_by_role("button", name=f"Remove gpu-1 for {MODEL}").click()
        await expect(page.locator("#said")).to_contain_text("Removed")
        assert all(info.removed for info in (await dispatcher.pool.inspect()).endpoints)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_telephone(browser: Browser, scheme: str) -> None:
    """On a small screen nothing is wider than the page, in the light and the dark theme."""
    size = {"width": 400, "height": 800}
    async with dispatching() as (it, dispatcher), SimulatedGpu(name="gpu-1") as gpu:
        await serve(dispatcher, "a-model-with-a-name-that-is-as-long-as-some-are" * 2, gpu)
        async with looking(browser, it, "/dispatch", viewport=size, color_scheme=scheme) as page:
            await expect(page.locator("#endpoints .state")).to_have_text("ready")
            assert await page.evaluate("document.documentElement.scrollWidth") == size["width"]


async def test_who_may(backend: Backend) -> None:
    """A user sees and changes only the models that the token allows (security 1, 2)."""
    only = Identity(name="a", verbs=frozenset({"admin"}), keys=(queue_of("mine"),))
    worker = Identity(name="w", verbs=frozenset({"consume", "publish"}))
    async with (
        dispatching(backend) as (it, dispatcher),
        SimulatedGpu(name="gpu-1") as gpu,
        http(it) as client,
    ):
        await serve(dispatcher, "mine", gpu)
        await serve(dispatcher, "theirs", gpu)
        it.context.hooks.register(Gate(a=only, w=worker))
        for one in PAGES:
            answer = await client.request(one.method, one.path, headers=PAGE)
            assert answer.status_code == 303
            assert answer.headers["location"].startswith("/login")
        assert (await client.get("/dispatch", headers=_as("w"))).status_code == 403
        text = (await client.get("/dispatch", headers=_as("a"))).text
        assert 'data-model="mine"' in text
        assert "theirs" not in text
        for model, status in (("theirs", 403), ("mine", 303), ("", 422)):
            answer = await client.post(
                "/dispatch/endpoints",
                data={"model": model, "server": "gpu-1", "action": "drain"},
                headers=_as("a"),
            )
            assert answer.status_code == status, model
        drained = {
            e.endpoint.model: e.draining for e in (await dispatcher.pool.inspect()).endpoints
        }
        assert drained == {"mine": True, "theirs": False}


def _as(token: str) -> dict[str, str]:
    return PAGE | {"authorization": f"Bearer {token}"}


async def test_who_may_see_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more models than the page lists, a user still sees the allowed ones.

    The page counts the omitted ones (security 2).
    """
    monkeypatch.setattr(snapshot, "MODELS", 2)
    only = Identity(name="a", verbs=frozenset({"admin"}), keys=(queue_of("zimg"),))
    async with dispatching() as (it, dispatcher), http(it) as client:
        for model in ("a", "b", "zimg"):
            await dispatcher.registry.register(model, "gpu-1", "http://127.0.0.1:1/", 1)
        assert "Not listed here: 1 more." in await shown(it)
        it.context.hooks.register(Gate(a=only))
        text = (await client.get("/dispatch", headers=_as("a"))).text
        assert 'href="/queues/dispatch%3Azimg"' in text
        assert "Not listed here" not in text


async def test_names_that_look_alike_together() -> None:
    """Two endpoints have separate figures even if model and server, joined by a slash, look the same (C12, OPEN-C5)."""
    async with dispatching() as (it, dispatcher):
        for model, server, slots in (("a", "b/c", 7), ("a/b", "c", 5)):
            await dispatcher.registry.register(model, server, "http://127.0.0.1:1/", slots)
        await dispatcher.registry.drain("a/b", "c")
        text = await shown(it)
        assert text.count("□□□□□□□<") == 1
        assert text.count(">draining<") == 1


async def test_odd_actions() -> None:
    """An unknown action, or an action on an endpoint that is gone, shows an error and changes nothing."""
    async with dispatching() as (it, dispatcher), http(it) as client:
        gone = {"model": "flux", "server": "gpu-9"}
        answer = await post(client, "/dispatch/endpoints", action="drain", **gone)
        assert answer.headers["location"] == "/dispatch?said=unknown"
        answer = await client.get(answer.headers["location"], headers=PAGE)
        assert "the endpoint no longer exists" in answer.text
        answer = await post(client, "/dispatch/endpoints", action="explode", **gone)
        assert answer.status_code == 422
        assert not (await dispatcher.pool.inspect()).endpoints


async def test_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is unavailable the page says so and keeps its content, and it recovers afterwards (fault H9)."""
    async with dispatching() as (it, dispatcher), SimulatedGpu(name="gpu-1") as gpu:
        await serve(dispatcher, "flux", gpu)
        assert "gpu-1" in await shown(it)
        right = snapshot._take

        async def away(*_: object) -> None:
            raise BackendUnavailable("away")

        monkeypatch.setattr(snapshot, "_take", away)
        async with http(it) as client:
            answer = await client.get("/dispatch", headers=PAGE)
            assert answer.status_code == 503
            assert "gpu-1" in answer.text
            assert "does not respond (backend_unavailable)" in answer.text
            monkeypatch.setattr(snapshot, "_take", right)
            assert (await client.get("/dispatch", headers=PAGE)).status_code == 200


async def test_the_stream_ends_with_the_right_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's live stream ends with a message when the user's token is revoked (security 2)."""
    monkeypatch.setattr(access, "CHECK_SECONDS", 0.1)
    gate = Gate(a=Identity(name="a", verbs=frozenset({"admin"})))
    async with dispatching() as (it, _):
        it.context.hooks.register(gate)
        async with (
            http(it) as client,
            client.stream("GET", "/dispatch/live", headers=_as("a")) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: sample"
            del gate.tokens["a"]
            assert "bye" in await _until_bye(lines)


async def _until_bye(lines: AsyncIterator[str]) -> str:
    async for line in lines:
        if line.startswith("event: bye"):
            return line
    return ""
