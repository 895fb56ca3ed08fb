"""The programs of the pages about unique tasks, schedules and codecs print what the pages say on each kind of store."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core import Queue, Tasks
from tests.application.running import OpenWorld, World, also_on_a_cluster, working
from tests.docs.programs import blocks
from tests.modules import own_package

DOCS = Path(__file__).parents[2] / "docs"


class Pages:
    """Runs programs of pages with the connection of a test."""

    def __init__(
        self,
        opened: World,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self._opened = opened
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def shop(self, page: str, module: str) -> Tasks:
        """Import the module ``shop.tasks`` of a page, and return its registry."""
        folder = self._folder / page
        (folder / "shop").mkdir(parents=True)
        (folder / "shop" / "tasks.py").write_text(module)
        self._monkeypatch.syspath_prepend(str(folder))
        tasks: Tasks = importlib.import_module("shop.tasks").tasks
        return tasks

    async def lines(self, program: str) -> list[str]:
        """Run a program, and return the lines that it prints."""
        names: dict[str, Any] = {}
        text = program.replace("asyncio.run(main())", "").replace('connect("server")', "connect()")
        exec(compile(text, "page", "exec"), names)  # noqa: S102 - an example of this project
        tasks: Tasks = names["tasks"]
        connect = tasks.connect
        with self._monkeypatch.context() as patch:
            patch.setattr(tasks, "connect", lambda: connect(Queue(self._opened.backend)))
            self._capsys.readouterr()
            await names["main"]()
        return self._capsys.readouterr().out.splitlines()


@also_on_a_cluster
async def test_programs(
    world: OpenWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """U12, U13, U17: unique tasks and debounces, schedules that are applied and put, and codecs."""
    monkeypatch.setenv("SHOP_KEY", Cipher.generate_key().decode())
    async with world() as opened:
        pages = Pages(opened, tmp_path, monkeypatch, capsys)
        page = (DOCS / "unique.md").read_text()
        (program,) = blocks(page, "python")
        assert await pages.lines(program) == re.findall(r"\)  # (True .*)", program)
        page = (DOCS / "schedules.md").read_text()
        module, program, _ = blocks(page, "python")
        with own_package("shop"):
            tasks = pages.shop("schedules", module)
            async with tasks.connect(Queue(opened.backend)):
                await tasks.apply()
            assert await pages.lines(program) == [
                *re.findall(r"It prints `(.*?)` and `(.*?)`", page)[0]
            ]
        page = " ".join((DOCS / "codecs.md").read_text().split())
        module, program, _ = blocks((DOCS / "codecs.md").read_text(), "python")
        with own_package("shop"):
            async with working(opened.worker(pages.shop("codecs", module))):
                assert await pages.lines(program) == [
                    *re.findall(r"It prints `(.*?)`, then `(.*?)`, and `(.*?)`", page)[0]
                ]
