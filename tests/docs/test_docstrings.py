"""The examples in docstrings: every public name has one, and all of them run."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet as Cipher

from taskqueue_core import Queue, chain
from taskqueue_core.queue_settings import change_settings
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from taskqueue_worker.testing import TestQueue

PACKAGES = ("taskqueue_core", "taskqueue_worker", "taskqueue_worker.testing")
SHOP = """
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskqueue_core import Depends, Reject, Tasks

tasks = Tasks(prefix="shop.")
started = asyncio.Event()
hangs = False


class Session:
    pass


class FakeSession(Session):
    pass


@asynccontextmanager
async def session() -> AsyncIterator[Session]:
    yield Session()


class Pool:
    pass


async def open_pool() -> Pool:
    return Pool()


@tasks.task
def resize(image: str, width: int = 320) -> dict[str, int]:
    return {"width": width}


@tasks.task
async def charge(order: int) -> None:
    started.set()
    if hangs:
        await asyncio.Event().wait()


@tasks.task
async def remind(order: int) -> None:
    pass


@tasks.task
async def refund(order: int, db: Session = Depends(session)) -> None:
    raise Reject("no_receipt", f"order {order}")


@tasks.task(index=("batch",), keep_ended=3600)
def measure(image: str) -> int:
    return len(image)


@tasks.task
def describe(size: dict[str, int]) -> str:
    return f"{size} pixels"


async def place_order(order: int) -> None:
    await charge.publish(order)
    await remind.using(delay=24 * 3600).publish(order)
"""
"""the module ``shop.tasks`` of the examples"""


def _public() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_documented = inspect.isclass(value) or inspect.isroutine(value)
            if is_documented and value.__module__.startswith("taskqueue_"):
                yield f"{package}.{name}", value


def _documented() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of every public name, and of the public methods of classes."""
    for name, value in _public():
        yield name, inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for member, function in vars(value).items():
                inner = getattr(function, "fget", function)
                if not member.startswith("_") and inspect.isroutine(inner):
                    yield f"{name}.{member}", inspect.getdoc(inner) or ""


EXAMPLES = {name: text for name, text in _documented() if ">>> " in text}


def test_every_public_name_has_an_example() -> None:
    """Every public name of the core and of the worker has an example in its docstring."""
    assert [name for name, _ in _public() if name not in EXAMPLES] == []


def _is_blocking(text: str) -> bool:
    return any("_sync(" in example.source for example in doctest.DocTestParser().get_examples(text))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example in a docstring runs, and prints what it says."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "tasks.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "taskqueue_memory")
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", "http://127.0.0.1:1")
    for loaded in [each for each in sys.modules if each.split(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, loaded)
    shop = importlib.import_module("shop.tasks")
    names: dict[str, Any] = {**vars(shop), "names": ["a.png", "b.png"]}
    names |= {"call": shop.resize.call("cat.png"), "worker": LocalWorker(shop.tasks)}
    names |= {name: Cipher.generate_key() for name in ("old_key", "new_key")}
    for package in PACKAGES:
        module = importlib.import_module(package)
        names |= {each: getattr(module, each) for each in module.__all__}
    text = EXAMPLES[name]
    if _is_blocking(text):
        with _blocking(shop, names):
            _run(text, name, names)
    else:
        asyncio.run(_run_async(text, name, names, shop))


@contextmanager
def _blocking(shop: Any, names: dict[str, Any]) -> Iterator[None]:
    with shop.tasks.connect_sync("taskqueue_memory") as queue:
        worker = LocalWorker(shop.tasks, backend=queue.queue.backend)
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(worker.serve(on_ready=ready.set)))
        names["queue"] = queue
        names["handle"] = shop.resize.using(id="cat-320").publish_sync("cat.png")
        thread.start()
        ready.wait()
        try:
            yield
        finally:
            worker.stop()
            thread.join()


def _run(text: str, name: str, names: dict[str, Any]) -> None:
    for example in doctest.DocTestParser().get_examples(text, name):
        with redirect_stdout(StringIO()) as out:
            exec(compile(example.source, name, "single"), names)  # noqa: S102 - an example of this project
        _check(example, out.getvalue())


@asynccontextmanager
async def _working(shop: Any, names: dict[str, Any]) -> AsyncIterator[None]:
    backend = MemoryBackend()
    await change_settings(
        backend.control, "mail", lambda old: old.model_copy(update={"capacity": 1})
    )
    async with shop.tasks.connect(Queue(backend)) as queue, asyncio.TaskGroup() as group:
        worker = LocalWorker(shop.tasks, backend=backend)
        ready = asyncio.Event()
        group.create_task(worker.serve(on_ready=ready.set))
        await ready.wait()
        handle = await shop.resize.using(id="cat-320").publish("cat.png")
        await handle.result()
        names |= {"queue": queue, "backend": backend, "handle": handle, "handles": [handle]}
        try:
            yield
        finally:
            worker.stop()


@asynccontextmanager
async def _testing(shop: Any, names: dict[str, Any]) -> AsyncIterator[None]:
    async with TestQueue(shop.tasks) as taskqueue:
        names["taskqueue"] = taskqueue
        await shop.place_order(17)
        yield


async def _run_async(text: str, name: str, names: dict[str, Any], shop: Any) -> None:
    setup = _testing if name.startswith("taskqueue_worker.testing") else _working
    shop.hangs = name.endswith("crash")
    async with setup(shop, names):
        if "flow_handle" in text:
            names["flow_handle"] = await chain(shop.resize.call("cat.png")).publish(id="cat-17")
            await names["flow_handle"].wait()
        for example in doctest.DocTestParser().get_examples(text, name):
            code = compile(example.source, name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            out = StringIO()
            with redirect_stdout(out):
                call: Callable[[], Awaitable[None] | None] = lambda: eval(code, names)  # noqa: S307, E731, B023
                if (started := call()) is not None:
                    await started
            _check(example, out.getvalue())


def _check(example: doctest.Example, printed: str) -> None:
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(example.want, printed, flags):
        difference = checker.output_difference(example, printed, flags)
        pytest.fail(f"{example.source}\n{difference}")
