"""Measure what the overview of many queues costs a browser: ``python benchmarks/first_paint.py [--queues N]``.

Each row has figures of several loads: the bytes of the page, the milliseconds until the browser painted text for the
first time, and its processor time, that of all its processes, until then and until the first live values are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Browser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.tasks import Task
from tests.dashboard.support import browsing
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.serving import serving

_TASKS, _AT_ONCE = 3, 100
_PAGES = {
    "overview": "/",
    "sorted": "/?sort=waiting",
    "last page": "/?page=1000",
    "search": "/?search=7",
    "a queue": "/queues/q0007",
}
_PAINTED = """() => new Promise(done => new PerformanceObserver(list => {
  const found = list.getEntriesByName("first-contentful-paint");
  if (found.length) done(found[0].startTime);
}).observe({type: "paint", buffered: true}))"""
_LIVE = "() => document.querySelector('#connection')?.dataset.state === 'live'"


def _family() -> list[int]:
    """Return the processes that this one has started, and those that they have started, except its servers."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1]), (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
    found = [os.getpid()]
    for pid in found:
        found += [child for child, (parent, _) in parents.items() if parent == pid]
    return [pid for pid in found if b"--type=" in parents[pid][1] or b"chrom" in parents[pid][1]]


def _spent() -> float:
    """Return the milliseconds of processor time of all threads of the browser."""
    total = 0
    for pid in _family():
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(file.read_text().split()[0])
            except OSError:
                continue
    return total / 1e6


async def _load(browser: Browser, url: str, path: str) -> tuple[float, ...]:
    """Return the bytes, the time of the first paint, and the processor time until then and until live values."""
    context = await browser.new_context(base_url=url)
    try:
        page = await context.new_page()
        before = _spent()
        answer = await page.goto(path, wait_until="commit")
        painted = await page.evaluate(_PAINTED)
        until_paint = _spent() - before
        await page.wait_for_function(_LIVE)
        spent = _spent() - before
        assert answer is not None
        return len(await answer.body()), painted, until_paint, spent
    finally:
        await context.close()


async def _measure(queues: int, rounds: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        own = Path(folder) / "server"
        own.mkdir()
        async with opened(server.url, "paint") as backend:
            keys = [f"q{n:04}" for n in range(queues)]
            for start in range(0, queues, _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                await backend.publisher.publish(*(Task(key=key) for key in some * _TASKS))
        started = serving(own, backend="redis", redis_url=server.url, redis_prefix="paint")
        async with started as running, browsing() as browser:
            print(f"{queues:,} queues\n{'page':12} {'bytes':>9} {'ms':>8} {'cpu':>8} {'live':>8}")
            for name, path in _PAGES.items():
                loads = [await _load(browser, running.url, path) for _ in range(rounds)]
                figures = map(statistics.median, zip(*loads, strict=True))
                print("{:12} {:9,.0f} {:8.0f} {:8.0f} {:8.0f}".format(name, *figures), flush=True)


def main() -> None:
    """Fill a store with queues, and print a row for each page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=2000, help="Number of queues.")
    parser.add_argument("--rounds", type=int, default=9, help="Number of loads of a page.")
    given = parser.parse_args()
    asyncio.run(_measure(given.queues, given.rounds))


if __name__ == "__main__":
    main()
