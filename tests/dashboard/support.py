"""Helpers for dashboard tests: a server under load, a browser, and an authentication plugin with revocable tokens."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from playwright.async_api import Browser, Page, async_playwright, expect

from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.hooks import Identity, hookimpl
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Ledger
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context, Worker
from tests.binaries import chromium
from tests.server.support import Running, running

PAGE = {"accept": "text/html"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
SECONDS_MS = 30_000
expect.set_options(timeout=SECONDS_MS)
_RAW = re.compile(r'data-ledger-([a-z-]+)="([0-9]+)"')


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Start a browser until the end of the block."""
    program = chromium()
    async with async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=program.path,
            env={**os.environ, **program.variables},
            args=["--no-sandbox"],
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def looking(
    browser: Browser, it: Running, path: str = "/", **options: Any
) -> AsyncIterator[Page]:
    """Open a page; at the end of the block its console must contain no message and no script error."""
    context = await browser.new_context(base_url=it.server.url, **options)
    context.set_default_timeout(SECONDS_MS)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    try:
        await page.goto(path)
        yield page
        expected = "Failed to load resource: the server responded with a status of"
        found = [one for one in complaints if expected not in one]
        assert not found, found
    finally:
        await context.close()


def raw_ledger(text: str) -> Ledger:
    """Return the ledger in the attributes of a page."""
    return Ledger(**{name.replace("-", "_"): int(number) for name, number in _RAW.findall(text)})


async def shown_ledger(page: Page) -> Ledger:
    """Return the ledger of a page in the browser, with all values from the same sample."""
    tag = await page.locator("#ledger").evaluate("element => element.cloneNode().outerHTML")
    return raw_ledger(tag)


class Gate:
    """An authentication plugin whose tokens a test can revoke."""

    def __init__(self, **tokens: Identity) -> None:
        self.tokens = tokens

    @hookimpl
    def authenticate(self, token: str | None) -> Identity | None:
        """Return the identity of the token, or None if the token is not accepted."""
        return self.tokens.get(token or "")


ADMIN = Identity(name="operator", verbs=frozenset({"admin", "publish"}))


class Load:
    """A worker and a publisher that run in the background while pages are tested."""

    def __init__(self, it: Running) -> None:
        self.it = it
        self.queue = Queue(it.context.backend)
        self.healed = False
        """whether tasks of the queue ``broken`` succeed from now on"""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Run the publisher and the worker until the end of the block."""
        once = QueueSettings(retry=RetryPolicy(max_attempts=1))
        await control_of(self.it.context.backend).configure("broken", once)
        worker = Worker(url=self.it.server.url, worker_id="worker-a", concurrency=20)

        @worker.task("resize")
        async def resize(number: int) -> int:
            await asyncio.sleep(0.01)
            return number

        @worker.task("broken")
        async def broken(text: str, context: Context) -> str:
            if not self.healed:
                raise ValueError(text)
            context.progress(0.5)
            return "mended"

        serving = asyncio.create_task(worker.serve())
        publishing = asyncio.create_task(self._publish())
        try:
            yield self
        finally:
            publishing.cancel()
            worker.stop()
            await asyncio.gather(publishing, serving, return_exceptions=True)

    async def _publish(self) -> None:
        number = 0
        while True:
            for _ in range(5):
                number += 1
                await self.queue.publish("resize", number, tenant=f"t{number % 2}")
            await asyncio.sleep(0.05)


@asynccontextmanager
async def loaded(**changes: Any) -> AsyncIterator[tuple[Running, Load]]:
    """Run a server under load."""
    async with running(MemoryBackend(), **changes) as it, Load(it).running() as load:
        yield it, load


async def post(client: httpx2.AsyncClient, path: str, **fields: Any) -> httpx2.Response:
    """Send a form as a browser without scripts does."""
    return await client.post(path, data=fields, headers=PAGE)
