"""Content of dashboard pages: size, headers, accessibility and escaping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from msgspec import structs

from taskqueue_core import Every, Schedule, TaskRef, TaskTemplate, WorkflowStep
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_server import dashboard
from taskqueue_server.dashboard.pages import FILES, local_path
from tests.server.support import Running

BUDGET = 200_000
STATIC = Path(dashboard.__file__).parent / "static"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
KEY = "<img=x>"
"""the most hostile valid queue name"""


async def fill(it: Running) -> None:
    """Create queues in several states, with hostile names and texts."""
    subscription = it.context.backend.subscribe([KEY, "k"], "worker-1")
    for key in (KEY, "k"):
        await it.publish("one", "two", key=key, tenant="<b>tenant", payload=b'"</script>"')
        received = await subscription.receive(1, 1)
        await subscription.dead_letter(  # type: ignore[attr-defined]
            received.deliveries[0], reason=HOSTILE, error=HOSTILE, traceback=f"at {HOSTILE}"
        )
    await it.publish("gone", key="k", not_before=4e9)
    (gone,) = await it.context.dead_letters.list("k")
    retried = structs.replace(gone.task, id="gone")
    publisher = it.context.backend.publisher
    await publisher.schedule_retry(retried, 4e9, error=HOSTILE, traceback=f"at {HOSTILE}")
    await it.context.control.cancel("k", "gone")
    await it.publish("later", key="later", not_before=4e9)
    template = TaskTemplate.of("k", HOSTILE, headers={"h": HOSTILE})
    await it.context.queue.schedules.put(Schedule("k", Every(60), template))
    await it.context.queue.schedules.trigger("k")
    steps = [
        WorkflowStep.of("a", KEY, HOSTILE, headers={"h": HOSTILE}),
        WorkflowStep.of("b", "later", after=("a", TaskRef("k", "one")), on_dead="hold"),
    ]
    await it.context.queue.workflows.put(steps, id="flow")


PAGES = (
    "/",
    "/workers",
    "/workers/worker-1?since=<b>",
    "/workers/worker-1",
    "/schedules",
    "/schedules?after=x",
    "/schedules/k",
    "/schedules/unknown",
    "/workflows",
    "/workflows?after=5.",
    "/workflows/flow",
    "/workflows/unknown",
    "/queues/k",
    "/queues/%3Cimg%3Dx%3E",
    "/dead",
    "/dead?filter=<img",
    "/queues/k/dead",
    "/queues/%3Cimg%3Dx%3E/dead",
    "/queues/k/tasks",
    "/queues/k/tasks?state=dead&tenant=<b>tenant",
    "/queues/k/tasks?state=scheduled&newest=true",
    "/queues/k/tasks?tag=%3Cb%3E",
    "/queues/unknown/tasks",
    "/queues/unknown",
    "/queues/unknown/dead",
    "/queues/k/dead?filter=nothing",
    "/tasks/k/one",
    "/tasks/k/two",
    "/tasks/k/gone",
    "/tasks/later/later",
    "/tasks/k/unknown",
    "/find",
    "/find?q=<script>alert(1)</script>",
    "/find?q=nothing",
    "/find?q=two",
)


async def test_nothing_is_markup(it: Running, client: httpx2.AsyncClient) -> None:
    """Security 25: keys, errors, tracebacks, payloads, tenants and search texts are escaped on every page (U10)."""
    await fill(it)
    for page in PAGES:
        text = (await client.get(page)).text
        assert "<script>alert" not in text, page
        assert "<img" not in text, page
        assert "<b>tenant" not in text, page
    dead = (await client.get("/tasks/k/one")).text
    assert "&lt;script&gt;alert(1)" in dead
    assert "{{7*7}}" in dead
    for page in ("/tasks/k/one", "/tasks/k/gone"):
        assert "<pre>at &lt;script&gt;alert(1)" in (await client.get(page)).text, page
    assert "Failures" in (await client.get("/tasks/k/gone")).text


async def test_pages_stand_on_good_headers(it: Running, client: httpx2.AsyncClient) -> None:
    """Security: every page and problem has the content security policy and is not cached.

    Pages contain no inline scripts or styles.
    """
    await fill(it)
    for page in PAGES:
        answer = await client.get(page)
        policy = answer.headers.get("content-security-policy", "")
        if answer.status_code == 303:
            continue
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy, page
        assert "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        for tag, attributes in Outline(answer.text).tags:
            assert tag != "style"
            assert tag != "script" or "src" in attributes
            assert not any(name == "style" or name.startswith("on") for name in attributes), page
    missing = await client.get("/queues/~bad")
    assert missing.status_code == 422
    assert "default-src 'none'" in missing.headers["content-security-policy"]


async def test_the_budget(it: Running, client: httpx2.AsyncClient) -> None:
    """The largest page with all its static files is smaller than 200 kB, uncompressed."""
    await fill(it)
    files = sum(len(text) for text in FILES.values())
    sizes = {page: len((await client.get(page)).content) for page in PAGES}
    assert files + max(sizes.values()) < BUDGET, (files, sizes)
    for name, size in sizes.items():
        assert size < 40_000, name


async def test_files_are_kept(client: httpx2.AsyncClient) -> None:
    """A static file with its content hash in the URL is cached forever; without the hash, it is revalidated."""
    page = (await client.get("/")).text
    addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert {one.split("?")[0].rpartition("/")[2] for one in addresses} == set(FILES)
    for address in addresses:
        found = await client.get(address)
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]
        plain = await client.get(address.split("?")[0])
        assert plain.headers["cache-control"] == "no-cache"
        tag = {"if-none-match": found.headers["etag"]}
        assert (await client.get(address, headers=tag)).status_code == 304
    for name in ("nothing.js", "VENDORED.md", "..%2Fapp.py"):
        assert (await client.get(f"/static/{name}")).status_code == 404
    for vendored in ("htmx", "uplot"):
        assert (STATIC / f"{vendored}.LICENSE.txt").exists()
        assert vendored in (STATIC / "VENDORED.md").read_text()


class Outline(HTMLParser):
    """The structure of a page, as assistive technology sees it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.within: list[list[str]] = []
        self.words: dict[int, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a tag and its ancestors."""
        self.tags.append((tag, dict(attrs)))
        self.within.append(list(self.open))
        if tag not in {"meta", "link", "input", "br", "rect", "path", "polyline"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def of(self, *names: str) -> Iterator[tuple[dict[str, str | None], list[str]]]:
        """Yield the attributes and ancestors of all elements with these names."""
        for (tag, attributes), within in zip(self.tags, self.within, strict=True):
            if tag in names:
                yield attributes, within


async def test_everything_has_a_name(it: Running, client: httpx2.AsyncClient) -> None:
    """Pages are accessible: they have a language, a title, labels, table scopes, one h1 and unique ids."""
    await fill(it)
    for page in PAGES:
        answer = await client.get(page)
        if answer.status_code == 303:
            continue
        outline = Outline(answer.text)
        (html,) = (attributes for attributes, _ in outline.of("html"))
        assert html["lang"] == "en"
        assert re.search(r"<title>\S.* · taskqueue</title>", answer.text), page
        assert len(list(outline.of("h1"))) == 1, page
        assert len(list(outline.of("main"))) == 1, page
        ids = [one["id"] for _, one in outline.tags if "id" in one]
        assert len(ids) == len(set(ids)), page
        labelled = {one.get("for") for one, _ in outline.of("label")}
        for one, within in outline.of("input", "select"):
            if one.get("type") != "hidden":
                assert one.get("id") in labelled or "label" in within, (page, one)
        for one, _ in outline.of("th"):
            assert one.get("scope") in {"col", "row"}, (page, one)
        for one, _ in outline.of("svg"):
            assert one.get("aria-hidden") == "true"
        for one, _ in outline.of("input", "section", "table", "figure", "nav"):
            for name in ("aria-labelledby", "aria-describedby"):
                assert one.get(name) is None or one[name] in ids, (page, one)
        for _, one in outline.tags:
            assert one.get("tabindex") in {None, "0", "-1"}


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, two: str) -> float:
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """Colours have the contrast that WCAG AA requires, in both themes, for text as well as for lines and borders."""
    css = (STATIC / "app.css").read_text()
    pairs = re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", css)
    colours = {name: (light, dark)[theme] for name, light, dark in pairs}
    text = [(one, on) for one in ("text", "quiet", "accent") for on in ("bg", "card", "raised")]
    text += [(one, on) for one in ("ok", "warn", "bad") for on in (f"{one}-bg", "card")]
    text += [("on-accent", "accent"), ("quiet", "line"), ("bad", "bg"), ("warn", "bg")]
    for one, on in text:
        assert _contrast(colours[one], colours[on]) >= 4.5, (one, on)
    for one in ("c1", "c2", "c3", "edge", "accent"):
        assert _contrast(colours[one], colours["card"]) >= 3, one


@pytest.mark.parametrize(
    "asked",
    ["//evil.example", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", "", None,
     "/a\r\nset-cookie: x=1", "/" + "a" * 3000, "evil", "/é"],
)  # fmt: skip
def test_next_is_local(asked: str | None) -> None:
    """Security: the redirect after signing in stays on this server, whatever the URL requested."""
    assert local_path(asked) == "/"


async def test_finding(it: Running, client: httpx2.AsyncClient) -> None:
    """U18: the search finds a task by key and id, by its id alone or by a tag, and a queue by its name."""
    await it.publish("one", key="a")
    await it.publish("one", "two", key="b")
    for asked, found in (
        ("a one", "/tasks/a/one"),
        ("a/one", "/tasks/a/one"),
        ("two", "/tasks/b/two"),
        ("b", "/queues/b"),
    ):
        answer = await client.get("/find", params={"q": asked})
        assert (answer.status_code, answer.headers["location"]) == (303, found)
    several = await client.get("/find", params={"q": "one"})
    assert several.status_code == 200
    assert several.text.count('href="/tasks/') == 2
    for key in ("a", "b"):
        await it.context.control.configure(key, QueueSettings(index=("user",)))
        await it.publish("alice", key=key, tags=("user:1",) if key == "a" else ("user:1", "user:2"))
    one = await client.get("/find", params={"q": "user:2"})
    assert one.headers["location"] == "/tasks/b/alice"
    several = await client.get("/find", params={"q": "user:1"})
    assert several.text.count('href="/tasks/') == 2
    assert '<td><a href="/queues/b">b</a></td>' in several.text
    for nothing in ("what is this", "three", "~~", "user:3", "job:1"):
        assert (await client.get("/find", params={"q": nothing})).status_code in {303, 404}


async def test_more_than_the_search_shows(it: Running, client: httpx2.AsyncClient) -> None:
    """U18: where a queue has more tasks with a tag than the search shows, it says so and leads to all of them."""
    for key, number in (("a", 21), ("b", 20)):
        await it.context.control.configure(key, QueueSettings(index=("user",)))
        await it.publish(*(f"{key}{n}" for n in range(number)), key=key, tags=("user:1",))
    page = (await client.get("/find", params={"q": "user:1"})).text
    assert page.count('href="/tasks/') == 40
    ((key, where),) = re.findall(r'<tr data-more-of="(.)">.+20 of more, <a href="([^"]+)">', page)
    assert key == "a"
    assert (await client.get(where)).text.count('<tr data-task="') == 21


async def test_the_due_time(it: Running, client: httpx2.AsyncClient) -> None:
    """U10: a scheduled task and a retry show when they are due, on their pages and in the search."""
    at = "2096-10-02 07:06:40 UTC"
    await it.publish("later", key="a", not_before=4e9)
    await it.publish("later", "now", key="b")
    assert f'<dd id="due">{at}</dd>' in (await client.get("/tasks/a/later")).text
    found = (await client.get("/find", params={"q": "later"})).text
    assert found.count(f"scheduled, due {at}") == found.count("due ") == 1
    assert 'id="due"' not in (await client.get("/tasks/b/now")).text
    subscription = it.context.backend.subscribe(["b"], "worker-1")
    for delivery in (await subscription.receive(2, 1)).deliveries:
        publisher = it.context.backend.publisher
        await publisher.schedule_retry(delivery.task, 4e9, error="no", settles=delivery)
    assert f'<dd id="due">{at}</dd>' in (await client.get("/tasks/b/now")).text


async def test_more_queues_than_fit(it: Running, client: httpx2.AsyncClient) -> None:
    """C17: a page of the overview lists some of the queues, which can be searched and sorted; its ledger has all."""
    tasks = [Task(key=f"q{n:03}") for n in range(203)]
    await it.context.backend.publisher.publish(*tasks, *(Task(key="q150") for _ in range(3)))
    shown = re.compile('<tr data-queue="(q[0-9]+)"')
    page = (await client.get("/")).text
    assert shown.findall(page) == [f"q{n:03}" for n in range(100)]
    assert 'data-ledger-published="206"' in page
    assert "Page 1 of 3" in page
    assert '<a href="/?page=2" rel="next">' in page
    page = (await client.get("/?page=3")).text
    assert shown.findall(page) == ["q200", "q201", "q202"]
    assert '<a href="/?page=2" rel="prev">' in page
    page = (await client.get("/?sort=waiting&page=9&search=%20Q1")).text
    assert shown.findall(page) == [f"q{n:03}" for n in (150, *range(100, 150), *range(151, 200))]
    assert "100 of 203" in page
    assert 'aria-sort="descending" title="Waiting tasks' in page
    assert "view=overview&amp;search=Q1&amp;sort=waiting" in page
    assert "No queue has “&lt;b&gt;” in its name" in (await client.get("/?search=<b>")).text
    for odd in ("page=0", "page=x", "page=1e9", "sort=__class__", "page=-1", "range=no"):
        assert shown.findall((await client.get(f"/?{odd}")).text)[0] == "q000"
