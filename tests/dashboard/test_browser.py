"""Dashboard behaviour that needs a browser: keyboard, themes, widths and partial updates of pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from taskqueue_core import After, Every, Queue, Schedule, TaskRef, TaskTemplate
from taskqueue_core.capabilities import Order, QueueSettings, control_of
from taskqueue_core.tasks import Ledger, QueueStats, State, Task
from taskqueue_memory import listing as memory_listing
from taskqueue_server.auth import access
from tests.dashboard.support import ADMIN, PAGE, Gate, looking
from tests.dashboard.test_forms import bury
from tests.server.support import eventually, http, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
_VISIBLE = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"


async def _tab_to(page: Page, name: str) -> None:
    """Press Tab until the element with this name has the focus; the focus must be visible at every step."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        told = await page.evaluate(
            "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).trim()"
        )
        if told:
            assert await page.evaluate(_VISIBLE), told
        if told == name:
            return
    raise AssertionError(f"{name} is not reachable with Tab")


async def test_by_keyboard_alone(browser: Browser) -> None:
    """Every action is possible with the keyboard alone: skip to the content, pause, resume, search and redrive.

    The focus is never lost.
    """
    async with running() as it:
        await bury(it, "dead-1")
        await it.publish("alive")
        async with looking(browser, it) as page:
            await page.keyboard.press("Tab")
            assert (
                await page.evaluate("document.activeElement.textContent") == "Skip to the content"
            )
            await page.keyboard.press("Enter")
            assert await page.evaluate("document.activeElement.id") == "main"
            await _tab_to(page, "Pause k")
            await page.keyboard.press("Enter")
            await expect(page.locator("#news").first).to_contain_text("No tasks are delivered")
            await expect(page.get_by_role("button", name="Resume k")).to_be_focused()
            await page.keyboard.press("Enter")
            await expect(page.locator("#news").first).to_contain_text("delivered again")
            await control_of(it.context.backend).configure(
                "fair", QueueSettings(order=Order.FAIR, paused_tenants=("acme",))
            )
            await page.goto("/queues/fair")
            await _tab_to(page, "Resume tenant acme")
            await page.keyboard.press("Enter")
            await expect(page.locator("#news").first).to_contain_text("delivered again")
            await page.keyboard.press("/")
            await page.keyboard.type("k dead-1")
            await page.keyboard.press("Enter")
            await expect(page.locator("#task-state")).to_have_text("Dead")
            await _tab_to(page, "Redrive")
            await page.keyboard.press("Space")
            await expect(page.locator("#task-state")).to_have_text("Waiting")
            assert await it.count(State.DEAD) == 0


async def _focused(page: Page, name: str) -> bool:
    found: str = await page.evaluate("document.activeElement.id")
    return found == name


async def test_settings_in_the_browser(browser: Browser) -> None:
    """A wrong value is shown next to its field, which gets the focus, and other input is kept.

    A valid form changes the settings.
    """
    async with running() as it:
        await it.publish("one")
        async with looking(browser, it, "/queues/k") as page:
            await page.get_by_label("Capacity", exact=True).fill("-5")
            await page.get_by_label("Processing time").fill("90")
            await page.get_by_role("button", name="Save settings").click()
            await expect(page.locator("[id='h-capacity']")).to_have_class("wrong-value")
            await eventually(lambda: _focused(page, "f-capacity"))
            await expect(page.get_by_label("Processing time")).to_have_value("90")
            await page.get_by_label("Capacity", exact=True).fill("5")
            await page.get_by_label("Order", exact=True).select_option("Fair by tenant")
            await page.get_by_role("button", name="Save settings").click()
            await expect(page.locator("#said")).to_contain_text("saved")
            found = await control_of(it.context.backend).settings("k")
            assert (found.capacity, found.max_processing_time, found.order.value) == (5, 90, "fair")
            await expect(page.locator("#chart-flow canvas")).to_be_visible()


async def test_dead_letters_in_the_browser(browser: Browser) -> None:
    """Selected dead letters can be redriven, or discarded after a confirmation.

    Pressing Enter in a checkbox triggers no button.
    """
    async with running() as it:
        await bury(it, "one", "two", "three")
        async with looking(browser, it, "/queues/k/dead") as page:
            box = page.get_by_label("Select one")
            await box.focus()
            await page.keyboard.press("Enter")
            await box.check()
            await page.get_by_role("button", name="Redrive selected").click()
            await expect(page.locator("#said")).to_contain_text("Redriven: 1.")
            assert await it.count(State.DEAD) == 2
            await page.get_by_label("Select all shown").check()
            await page.locator("summary", has_text="Discard").click()
            await page.get_by_role("button", name="Discard selected").click()
            await expect(page.get_by_role("alert")).to_contain_text("tick the box")
            await page.locator("summary", has_text="Discard").click()
            await page.get_by_label("Yes, discard them").check()
            await page.get_by_role("button", name="Discard all 2").click()
            await expect(page.get_by_text("No dead letters.")).to_be_visible()
            assert await it.count(State.DISCARDED) == 2


async def test_a_page_follows(browser: Browser) -> None:
    """New queues appear without a reload, and the focused element keeps the focus."""
    async with running() as it:
        await it.publish("one")
        async with looking(browser, it) as page:
            await expect(page.locator("#connection b")).to_have_text("Live")
            await page.locator("#pause-k").focus()
            await it.publish("one", key="another")
            await expect(page.locator('[data-queue="another"]')).to_be_visible()
            assert await page.evaluate("document.activeElement.id") == "pause-k"
            await expect(page.locator('[data-live="q.another.state"]')).to_have_text("No consumer")


_OVERLAPS = """parts => parts.some((one, place) => {
    const next = parts[place + 1];
    const [a, b] = [one.getBoundingClientRect(), next?.getBoundingClientRect()];
    return a.right > innerWidth || (b && a.bottom > b.top + 2 && a.top < b.bottom - 2 && a.right > b.left);
})"""


async def test_a_filtered_list_reads_on(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """U20: a list whose filter finds few tasks reads on until its page is full, or all tasks were read.

    Without scripts, the page has a link to the next page. No request reads more than a page of the store.
    """
    monkeypatch.setattr(memory_listing, "LOOKED_AT", 100)
    async with running() as it:
        await it.backend.publisher.publish(
            *(Task(key="k", id=f"t{n:04}", tenant="ab"[n % 50 == 49]) for n in range(3000))
        )
        async with http(it, headers=PAGE) as client:
            part = (await client.get("/queues/k/tasks?tenant=b")).text
        assert part.count("<tr data-task") == 2
        assert "2 shown, 100 read" in part
        async with looking(browser, it, "/queues/k/tasks?tenant=b") as page:
            await expect(page.locator("#more")).to_contain_text("50 shown, 2,500 read")
            shown = await page.locator("tr[data-task]").evaluate_all(
                "rows => rows.map(r => r.dataset.task)"
            )
            assert shown == [f"t{n:04}" for n in range(49, 2500, 50)]
            await page.get_by_role("link", name="Next page").click()
            await expect(page.locator("#more")).to_contain_text("10 shown, 500 read")
            await page.goto("/queues/k/tasks?tenant=c")
            await expect(page.locator("#tasks")).to_contain_text("No such task")
            await expect(page.locator("[data-more]")).to_have_count(0)
            await page.goto("/queues/k/tasks?tenant=a")
            await expect(page.locator("#more")).to_contain_text("50 shown, 51 read")


async def test_a_list_by_time(browser: Browser) -> None:
    """U20: the times and the worker of a list are chosen with the keyboard alone, in a window of 360 pixels as well."""
    async with running() as it:
        await bury(it, "dead-1")
        window: dict[str, Any] = {"viewport": {"width": 360, "height": 700}, "locale": "en-US"}
        async with looking(browser, it, "/queues/k/tasks?state=dead", **window) as page:
            await page.get_by_label("Worker").focus()
            await page.keyboard.type("worker-1")
            for name, year in (("since", 2025), ("until", 2100)):
                # A field of a time has a stop for each of its parts.
                while await page.evaluate("document.activeElement.id") != name:
                    await page.keyboard.press("Tab")
                await page.keyboard.type(f"0102{year}")
                await page.keyboard.press("ArrowRight")
                await page.keyboard.type("020500PM")
            await page.keyboard.press("Enter")
            await page.wait_for_url("**since=2025-01-02T14%3A05*until=2100-01-02T14%3A05*")
            await expect(page.locator("tr[data-task]")).to_have_count(1)
            await expect(page.get_by_label("Failed from (UTC)")).to_have_value("2025-01-02T14:05")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360
            await page.get_by_label("Failed until (UTC)").fill("2025-06-01T00:00")
            await page.keyboard.press("Enter")
            await expect(page.locator("#tasks")).to_contain_text("No such task")


async def test_a_notice_with_something_to_do(browser: Browser) -> None:
    """U21: the notice that names the queues in which a tenant is not paused is in view, wherever the form was."""
    async with running() as it:
        fair = QueueSettings(order=Order.FAIR)
        await control_of(it.context.backend).configure("k", fair)
        await it.publish("one", key="fifo", tenant="acme")
        async with looking(browser, it, "/queues/k") as page:
            await page.get_by_label("Tenant", exact=True).fill("acme")
            await page.get_by_label("in all queues with fair order").check()
            await page.get_by_role("button", name="Pause", exact=True).click()
            await expect(page.locator("#said")).to_contain_text("Not paused, because")
            await expect(page.locator("#said")).to_be_in_viewport(ratio=1)


async def test_widths_and_themes(browser: Browser) -> None:
    """No page is wider than the window, numbers do not overlap, and the chosen theme is kept."""
    async with running() as it:
        await it.publish("one", "two", tenant="acme")
        await bury(it, "a" * 60)
        size = {"width": 1280, "height": 800}
        stats, much = it.context.control.stats, 9_876_543_210_123
        books = Ledger(published=2 * much, done=much, dead=1_234_567, waiting=much - 1_234_567)

        async def huge(key: str) -> QueueStats:
            return msgspec.structs.replace(await stats(key), ledger=books)

        it.context.control.stats = huge  # type: ignore[method-assign]
        async with looking(browser, it, viewport=size, color_scheme="light") as page:
            for _ in range(2):
                await page.get_by_role("button", name="Theme").click()
            for path in (
                "/",
                "/workers",
                "/workers/worker-1",
                "/queues/k",
                "/queues/k/dead",
                f"/tasks/k/{'a' * 60}",
                "/find?q=x",
            ):
                await page.goto(path)
                for width in (1280, 360):
                    await page.set_viewport_size({"width": width, "height": 800})
                    wide = await page.evaluate("document.documentElement.scrollWidth")
                    assert wide <= width, path
                    assert not await page.locator(".sum dd").evaluate_all(_OVERLAPS), path
                assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
                dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert dark == "rgb(15, 17, 21)"


async def test_accessibility(browser: Browser) -> None:
    """U20: axe has no serious finding on any page, in both themes."""
    async with running() as it:
        backend, axe, found = it.context.backend, Axe(), list[str]()
        settings = QueueSettings(index=("user",), order=Order.FAIR, paused=True)
        await control_of(backend).configure("k", settings)
        await bury(it, "dead-1")
        await it.publish("one", "two", tenant="acme", tags=("user:42",))
        await it.publish("later", after=After(tasks=(TaskRef("k", "one"),)))
        sweep = Schedule("sweep", Every(900), TaskTemplate.of("k", 0))
        await Queue(backend).schedules.put(sweep)
        worker = backend.subscribe(["k"], "worker-1")
        pages = (
            "/", "/?search=nothing", "/workers", "/workers/worker-1", "/schedules", "/schedules/sweep",
            "/queues/k", "/queues/k/dead",
            "/queues/k/tasks", "/queues/k/tasks?state=blocked", "/queues/k/tasks?tag=user:42", "/tasks/k/dead-1",
            "/queues/k/tasks?state=dead&worker=worker-1&since=-1h",
            "/tasks/k/later", "/audit", "/find?q=nothing", "/login", "/queues/~",
        )  # fmt: skip
        for theme in ("light", "dark"):
            async with looking(browser, it, color_scheme=theme) as page:
                for path in pages:
                    await page.goto(path)
                    answer = (await axe.run(page)).response
                    found += [
                        f"{path} ({theme}): {one['id']}: {one['help']}: {node['html'][:200]}"
                        for one in answer["violations"]
                        if one["impact"] in {"serious", "critical"}
                        for node in one["nodes"]
                    ]
        await worker.close()
        assert not found, "\n".join(found)


async def test_without_scripts(browser: Browser) -> None:
    """Without JavaScript, buttons and search work through forms, and elements that need a script are hidden."""
    async with running() as it:
        await it.publish("one")
        async with looking(browser, it, java_script_enabled=False) as page:
            await page.get_by_role("button", name="Pause k").click()
            await expect(page.locator("#said")).to_contain_text("No tasks are delivered")
            await expect(page.get_by_role("button", name="Resume k")).to_be_visible()
            await expect(page.get_by_role("button", name="Theme")).to_be_hidden()
            await expect(page.get_by_role("link", name="Reload")).to_be_visible()
            await page.get_by_role("searchbox").fill("k one")
            await page.keyboard.press("Enter")
            await expect(page.locator("#task-state")).to_have_text("Waiting")


async def test_a_token_that_is_taken_away(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security 6: if a token is revoked, an open page goes to the sign-in page within ten seconds."""
    monkeypatch.setattr(access, "CHECK_SECONDS", 0.3)
    async with running() as it:
        gate = Gate(all=ADMIN)
        it.context.hooks.register(gate)
        await it.publish("one", key="alpha")
        async with looking(browser, it) as page:
            await page.get_by_label("Token").fill("nonsense")
            await page.get_by_role("button", name="Sign in").click()
            await page.get_by_text("Unknown token").wait_for()
            await page.get_by_label("Token").fill("all")
            await page.keyboard.press("Enter")
            await page.get_by_text("Live", exact=True).wait_for()
            assert await page.evaluate("document.cookie") == ""
            gate.tokens.clear()
            await page.wait_for_url("**/login**")
            gate.tokens["all"] = ADMIN
            await page.get_by_label("Token").fill("all")
            await page.keyboard.press("Enter")
            await page.get_by_role("button", name="Sign out").click()
            await page.get_by_text("Signed out.").wait_for()
            await page.goto("/")
            await page.wait_for_url("**/login**")
            assert await page.context.cookies() == []
