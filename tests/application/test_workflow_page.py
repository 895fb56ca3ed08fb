"""The page about workflows: its code runs as shown on each kind of store, and its lists agree with the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from taskqueue_core import Batch, Queue, State, Tasks, chain
from taskqueue_core.after import When
from taskqueue_core.workflows import WorkflowState
from tests.application.running import OpenWorld, also_on_a_cluster, working
from tests.docs.programs import blocks
from tests.modules import own_package

PAGE = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()
MODULE, PROGRAM, SPLIT, BATCH, MEMBERS = blocks(PAGE, "python")


@also_on_a_cluster
async def test_the_code(
    world: OpenWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """U15: the program of the page prints what the page says."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "tasks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with own_package("shop"):
        tasks = importlib.import_module("shop.tasks").tasks
        await _run_page(world, monkeypatch, tasks)
    assert capsys.readouterr().out.splitlines() == [
        *re.findall(r"It prints `(.*?)` and `(.*?)`", PAGE)[0]
    ]


async def _run_page(world: OpenWorld, monkeypatch: pytest.MonkeyPatch, tasks: Tasks) -> None:
    """Run the programs of the page with its tasks."""
    names: dict[str, Any] = {}
    program = PROGRAM.replace("asyncio.run(main())", "").replace('connect("server")', "connect()")
    exec(compile(program, "page", "exec"), names)  # noqa: S102 - an example of this project
    for text in (SPLIT, MEMBERS):
        exec(compile(text, "page", "exec"), names)  # noqa: S102 - an example of this project
    async with world() as opened, working(opened.worker(tasks)):
        connect = tasks.connect
        monkeypatch.setattr(tasks, "connect", lambda: connect(Queue(opened.backend)))
        await names["main"]()
        async with tasks.connect():
            names |= {"pages": [["a", "b"], ["c"]]}
            body = "async def run():\n" + "".join(f"    {line}\n" for line in BATCH.splitlines())
            exec(compile(f"{body}    return batch\n", "page", "exec"), names)  # noqa: S102 - as above
            assert await (await names["run"]()).wait(60) is State.DONE
            handle = await chain(names["split"].call("cat.png", [1, 2])).publish(id="cat-18")
            status = await handle.wait(60)
            assert status.state is WorkflowState.ENDED
            whole = ["split", "split:resize", "split:resize-2", "split:last"]
            assert [step.name for step in status.steps] == whole
            assert all(f"`{name}`" in PAGE for name in whole)
            last = tasks.functions["shop.notify"].handle("cat-18.split:last")
            assert await last.result(60) == "resized ['1-cat.png', '2-cat.png']"

            await tasks.apply()
            batch = Batch(then=names["total"].call(), id="cat-19")
            members = await batch.add(*(names["measure"].call(image) for image in ("a", "bb")))
            await batch.close()
            assert await tasks.functions["shop.total"].handle("cat-19.then").result(60) == 3
            found = [pair async for pair in batch.results(names["measure"])]
            assert found == [(members[0].id, 1), (members[1].id, 2)]


def test_lists() -> None:
    """U15: the page has each condition and each state of a workflow."""
    for name in (*get_args(When), *WorkflowState):
        assert f"`{name}`" in PAGE
