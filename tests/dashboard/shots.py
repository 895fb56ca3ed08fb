"""Take the screenshots of docs/dashboard.md: ``python -m tests.dashboard.shots [folder]``.

A server with generated load is recorded for half a minute. With ``all`` as the second argument, screenshots of every
page are taken, in both themes and at phone width, for a visual check of a change.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from playwright.async_api import Browser

from taskqueue_core import Cron, Every, Schedule, TaskTemplate
from taskqueue_core.capabilities import Fire, Order, QueueSettings, Skip, control_of, schedules_of
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_worker import Worker
from tests.dashboard.support import browsing
from tests.server.support import Running, running

_DOCS = Path(__file__).parents[2] / "docs"
_SECONDS = 30
_ONCE = RetryPolicy(max_attempts=1)
_RULES = {
    "nightly-report": QueueSettings(paused=True),
    "render-video": QueueSettings(max_inflight=8),
    "send-email": QueueSettings(retry=_ONCE),
    "thumbnail": QueueSettings(
        order=Order.FAIR, capacity=5000, max_inflight=40, weights={"acme": 3}, retry=_ONCE
    ),
    "translate": QueueSettings(),
}
_PER_SECOND = {
    "nightly-report": 2, "render-video": 6, "send-email": 40, "thumbnail": 90, "translate": 0.3,
}  # fmt: skip
_PAGES = {
    "overview": "/",
    "workers": "/workers",
    "schedules": "/schedules",
    "schedule": "/schedules/report.weekdays",
    "queue": "/queues/thumbnail",
    "dead": "/queues/thumbnail/dead",
    "tasks": "/queues/thumbnail/tasks?state=done&newest=true",
    "task": "/find?q=broken-1",
    "unknown": "/queues/nothing-here",
    "problem": "/queues/~",
}


async def _publish(queue: Queue, key: str, per_second: float) -> None:
    while True:
        await asyncio.sleep(random.expovariate(per_second))
        tenant = random.choice(("acme", "globex", "initech"))
        await queue.publish(key, 0, tenant=tenant)


async def _schedule(queue: Queue) -> None:
    mail = TaskTemplate.of("send-email", {"to": "ada"})
    weekdays = Cron("0 9 * * MON-FRI", "Europe/Berlin")
    for schedule in (
        Schedule("report.weekdays", weekdays, mail, jitter=30),
        Schedule("sweep", Every(900), TaskTemplate.of("thumbnail", 0)),
        Schedule("nightly", Cron("@daily"), TaskTemplate.of("nightly-report"), paused=True),
    ):
        await queue.schedules.put(schedule)
    (stored,) = await schedules_of(queue.backend).list(after="nightly", limit=1)
    skipped = (Skip(1_792_000_000.0, "missed", 3), Skip(1_793_000_000.0, "refused"))
    at = stored.next_at
    fire = Fire(
        key=stored.key,
        name=stored.name,
        version=stored.version,
        planned_for=at,
        next_at=at,
        skipped=skipped,
    )
    await schedules_of(queue.backend).fire(fire)
    await queue.schedules.trigger("report.weekdays")


def _workers(url: str) -> list[Worker]:
    quick = Worker(url=url, worker_id="worker-a", concurrency=30)
    slow = Worker(url=url, worker_id="worker-b", concurrency=8)

    async def run(number: int) -> dict[str, int]:
        await asyncio.sleep(random.expovariate(20))
        if number:
            raise ValueError(f"the image has no pixels: {number} of <width> by <height>")
        return {"width": 320, "height": 240}

    async def render(number: int) -> int:
        await asyncio.sleep(random.uniform(0.5, 2))
        return number

    quick.task("thumbnail")(run)
    quick.task("send-email")(run)
    slow.task("render-video")(render)
    return [quick, slow]


async def _shoot(
    browser: Browser, it: Running, name: str, path: str, folder: Path, **how: object
) -> None:
    context = await browser.new_context(base_url=it.server.url, **how)  # type: ignore[arg-type]
    page = await context.new_page()
    await page.goto(path)
    await page.wait_for_timeout(2500)
    await page.screenshot(path=folder / f"{name}.png", full_page="viewport" not in how)
    await context.close()


async def _main(folder: Path, *, every: bool) -> None:
    async with AsyncExitStack() as stack:
        browser = await stack.enter_async_context(browsing())
        it = await stack.enter_async_context(running())
        queue = Queue(it.context.backend)
        for key, rules in _RULES.items():
            await control_of(it.context.backend).configure(key, rules)
        workers = _workers(it.server.url)
        tasks = [asyncio.create_task(worker.serve()) for worker in workers]
        tasks += [asyncio.create_task(_publish(queue, *one)) for one in _PER_SECOND.items()]
        for number in (1, 2, 3):
            await queue.publish("thumbnail", number, id=f"broken-{number}", tenant="acme")
        await _schedule(queue)
        watching = await browser.new_page(base_url=it.server.url)
        await watching.goto("/")
        await asyncio.sleep(_SECONDS)
        for scheme in ("light", "dark"):
            size = {"width": 1180, "height": 770}
            await _shoot(
                browser, it, f"dashboard-{scheme}", "/", folder, viewport=size, color_scheme=scheme
            )
            for name, path in _PAGES.items() if every else ():
                await _shoot(browser, it, f"{name}-{scheme}", path, folder, color_scheme=scheme)
                phone = {"width": 400, "height": 860}
                await _shoot(
                    browser,
                    it,
                    f"{name}-{scheme}-400",
                    path,
                    folder,
                    viewport=phone,
                    color_scheme=scheme,
                )
        await browser.close()
        for worker in workers:
            worker.stop()
        for task in tasks[len(workers) :]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else _DOCS
    asyncio.run(_main(where, every=sys.argv[2:] == ["all"]))
