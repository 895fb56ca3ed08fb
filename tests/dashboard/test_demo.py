"""An operator's session at the dashboard of a server under load, with a real browser, server and worker."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from taskqueue_core.capabilities import control_of
from taskqueue_server.dashboard import snapshot
from tests.dashboard.support import loaded, looking, raw_ledger, shown_ledger
from tests.server.support import eventually, http

pytestmark = pytest.mark.asyncio(loop_scope="module")
_ROW = '[data-queue="resize"]'


async def _done(page: Page) -> int:
    return (await shown_ledger(page)).done


async def test_the_demo(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page shows live counts; a paused queue stops; a dead letter is redriven and runs to its end."""
    monkeypatch.setattr(snapshot, "_WINDOW", 1.0)
    async with loaded() as (it, load), looking(browser, it) as page:
        control = control_of(it.context.backend)
        # The counts change without a reload.
        await expect(page.locator("#connection b")).to_have_text("Live")
        before = await _done(page)
        await eventually(lambda: _more_than(page, before))
        rate = page.locator('[data-live="q.resize.done"]')
        await expect(rate).not_to_have_text("0")
        await expect(page.locator("#chart-flow canvas")).to_be_visible()
        # The Pause button stops the queue, both on the page and in the ledger.
        await page.get_by_role("button", name="Pause resize").click()
        await expect(page.locator(f"{_ROW} .state")).to_contain_text("Paused")
        await expect(page.locator("#said")).to_contain_text("No tasks are delivered")
        await it.reaches("resize", in_flight=0)
        stopped = (await control.ledger("resize")).done
        await expect(rate).to_have_text("0")
        assert (await control.ledger("resize")).done == stopped
        assert (await control.ledger("resize")).waiting > 0
        await page.get_by_role("button", name="Resume resize").click()
        await expect(page.locator(f"{_ROW} .state")).to_have_text("Working")
        await expect(rate).not_to_have_text("0")
        # A dead letter shows its error, and the Redrive button runs it again.
        await load.queue.publish("broken", "no such <b>picture</b>", id="picture-7")
        await it.reaches("broken", dead=1)
        await page.get_by_role("link", name="Dead letters of broken").click()
        await expect(page.locator('[data-task="picture-7"] .why')).to_contain_text(
            "no such <b>picture</b>"
        )
        await page.get_by_role("link", name="picture-7").click()
        await expect(page.locator("#task-state")).to_have_text("Dead")
        await control.configure(
            "broken",
            (await control.settings("broken")).model_copy(update={"paused": True}),
        )
        load.healed = True
        await page.get_by_role("button", name="Redrive").click()
        await expect(page.locator("#task-state")).to_have_text("Waiting")
        await control.configure(
            "broken",
            (await control.settings("broken")).model_copy(update={"paused": False}),
        )
        # The page of the task shows each change until the end, without a reload.
        await expect(page.locator("#task-state")).to_have_text("Done")
        await expect(page.locator("#result")).to_have_text('"mended"')


async def _more_than(page: Page, number: int) -> bool:
    return await _done(page) > number


async def test_figures_equal_the_ledger(browser: Browser) -> None:
    """C17, law 1: under load, the ledger on the page lies between the API's ledger before and after it."""
    async with (
        loaded() as (it, _load),
        looking(browser, it) as page,
        http(it) as client,
    ):
        for _ in range(15):
            before = (await client.get("/v1/ledger")).json()
            shown = raw_ledger((await client.get("/")).text)
            after = (await client.get("/v1/ledger")).json()
            live = await shown_ledger(page)
            assert shown.balanced
            assert live.balanced
            for name in ("published", "done", "dead", "cancelled", "expired", "discarded"):
                assert before[name] <= getattr(shown, name) <= after[name]
            if before == after:
                assert all(before[name] == getattr(shown, name) for name in shown.__struct_fields__)
        control = control_of(it.context.backend)
        for pause in ("paused", "intake_paused"):
            found = await control.settings("resize")
            await control.configure("resize", found.model_copy(update={pause: True}))
        await it.reaches("resize", in_flight=0)
        still = (await client.get("/v1/ledger")).json()
        shown = raw_ledger((await client.get("/")).text)
        assert {name: still[name] for name in shown.__struct_fields__} == {
            name: getattr(shown, name) for name in shown.__struct_fields__
        }

        async def same() -> bool:
            return await shown_ledger(page) == shown

        await eventually(same)
        text = await page.locator('[data-live="ledger.published"]').inner_text()
        assert int(text.replace(",", "")) == still["published"]
