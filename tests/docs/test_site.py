"""The documentation site: it builds without a warning, asks no other host, and is complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser

from tests.dashboard.support import browsing

ROOT = Path(__file__).parents[2]
LARGEST = 200_000
"""maximum number of bytes of a page, without its pictures"""
PUBLIC = ("taskqueue_core", "taskqueue_worker", "taskqueue_worker.testing")
LOOKED_AT = ("index.html", "tasks.html", "reference/settings.html", "reference/api/workers.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """U24: every public name of the core, the worker and the test queue has an entry in the reference."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.partition(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    core = set(importlib.import_module("taskqueue_core").__all__)
    missing = [
        f"{package}.{name}"
        for package in PUBLIC
        for name in importlib.import_module(package).__all__
        if f"{package}.{name}" not in known
        and not (package == "taskqueue_worker" and name in core)  # the same object
    ]
    assert not missing


def test_no_page_is_too_large(site: Path) -> None:
    """U24: every page loads quickly: none has over 200 kB."""
    sizes = {str(page.relative_to(site)): page.stat().st_size for page in site.rglob("*.html")}
    assert len(sizes) > 40
    assert not {name: size for name, size in sizes.items() if size > LARGEST}


def test_links_have_targets(site: Path) -> None:
    """U24: every link and anchor within the site exists."""
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        if page.name == "404.html":
            continue  # its links begin at the root of a web server
        for link in re.findall(r'\bhref="([^"#:]*)(?:#([^":]*))?"', text):
            path, anchor = link
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.append(f"{page.relative_to(site)}: {path}#{anchor}")
    assert not broken


@pytest.fixture
async def browser() -> object:
    """A browser."""
    async with browsing() as browser:
        yield browser


async def test_pages_in_a_browser(site: Path, browser: Browser) -> None:
    """U24: opened from a folder, pages ask no other host, are no wider than a phone, and axe has no serious finding."""
    axe, found, requests, errors = Axe(), list[str](), list[str](), list[str]()
    for theme in ("light", "dark"):
        context = await browser.new_context(
            color_scheme=theme, viewport={"width": 360, "height": 800}
        )
        page = await context.new_page()
        page.on("request", lambda one: requests.append(one.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in LOOKED_AT:
            await page.goto(f"file://{site}/{path}")
            width = await page.evaluate("document.documentElement.scrollWidth")
            if width > 360:
                found.append(f"{path} is {width} pixels wide")
            answer = (await axe.run(page)).response
            found += [
                f"{path} ({theme}): {one['id']}: {one['help']}: {node['html'][:200]}"
                for one in answer["violations"]
                if one["impact"] in {"serious", "critical"}
                for node in one["nodes"]
            ]
        await context.close()
    assert not errors
    assert not [url for url in requests if not url.startswith("file:")]
    assert not found, "\n".join(found)


async def test_search_from_a_folder(site: Path, browser: Browser) -> None:
    """U24: the search works on pages that were opened from a folder, without a server and without a network."""
    page = await browser.new_page()
    await page.goto(f"file://{site}/reference/api/workers.html")
    await page.click("input.md-search__input")
    await page.keyboard.type("throttle", delay=30)
    await page.wait_for_selector(".md-search-result__item mark", state="attached")
