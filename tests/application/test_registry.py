"""Declaring tasks: names, signatures, options, and several registries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from pydantic import Field

from taskqueue_core import Context, NotConnected, Queue, Tasks, connect
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.running import working

ANY_TASKS: Any = Tasks


async def fetch(url: str) -> str:
    """A task."""
    return url


def test_names() -> None:
    """U1: a task has the name of its function, or the given one, after the prefix; its module does not matter."""
    tasks = Tasks(prefix="shop.")
    assert tasks.task(fetch).name == "shop.fetch"
    assert tasks.task("get")(fetch).name == "shop.get"
    shared = tasks.task("head", queue="http")(fetch)
    assert (shared.name, shared.queue) == ("shop.head", "http")
    assert tasks.task("sized")(partial(fetch, url="x")).name == "shop.sized"
    assert list(tasks.functions) == ["shop.fetch", "shop.get", "shop.head", "shop.sized"]


async def test_a_declared_task_is_still_the_function() -> None:
    """U1: a declared function is called as before, and keeps its name, docstring and module."""
    declared = Tasks().task(fetch)
    assert await declared("x") == "x"
    assert (vars(declared)["__name__"], declared.__doc__) == ("fetch", "A task.")
    assert repr(declared) == "<task fetch>"


async def test_attributes_of_a_function_do_not_replace_those_of_its_task() -> None:
    """U1: a function whose decorator sets attributes, as `singledispatch` does, is a task that has the others."""

    async def double(number: int) -> int:
        return 2 * number

    vars(double).update(registry={}, options="x", publish="x", policies="x", author="a")
    tasks = Tasks()
    declared = tasks.task(double)
    assert vars(declared)["author"] == "a"
    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        assert await (await declared.publish(2)).result(10) == 4


def _variable(*names: str) -> None: ...


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _positional(name: str, /) -> None: ...


def _field(name: str = Field("x")) -> None: ...


def _unknown(name: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - that is the case


def _generator(name: str) -> Any:
    yield name


def _context(order: int, context) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case


def _ctx(ctx, order: int) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case


def _method(self, order: int) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the case


@pytest.mark.parametrize(
    ("declare", "fault"),
    [
        (lambda tasks: tasks.task("not a name")(fetch), "name of the task: got str of length 10 that contains ' '"),
        (lambda tasks: (tasks.task(fetch), tasks.task("fetch")(_field)), "Field"),
        (lambda tasks: (tasks.task(fetch), tasks.task(fetch)), "the function tests.application.test_registry.fetch"),
        (lambda tasks: ExitStack().enter_context(tasks.connect("memory")), "write 'async with tasks.connect(...)'"),
        (lambda tasks: tasks.include(pytest), "include: got module; expected a Tasks object"),
        (lambda tasks: tasks.task(lambda: None), "without a name"),
        (lambda tasks: tasks.task(3), "expected a function, or a name"),
        (lambda tasks: tasks.task("x")(3), "expected a function"),
        (lambda tasks: tasks.task(_variable), "write 'names: list[...]' without the '*'"),
        (lambda tasks: tasks.task(_positional), "'name' cannot be passed by name: remove the '/'"),
        (lambda tasks: tasks.task(_undecorated(fetch)), "write @functools.wraps(function) above that function"),
        (lambda tasks: tasks.task(Tasks), "the task 'Tasks' is the class Tasks; expected a function"),
        (lambda tasks: tasks.task("x")(partial(dict, a=1)), "the task 'x' is the class dict; expected a function"),
        (lambda tasks: tasks.task(_field), "use Annotated[..., Field(...)]"),
        (lambda tasks: tasks.task(_unknown), "'Missing' is not defined; import it in the module"),
        (lambda tasks: tasks.task(_generator), "generator"),
        (lambda tasks: tasks.task("x", queue="a b")(fetch), "queue: got"),
        (lambda tasks: tasks.task("x", timeout=0)(fetch), "timeout must be greater than or equal to 0.001"),
        (lambda tasks: tasks.task("x", batch=0)(fetch), "allowed: a whole number from 1 to 1000"),
        (lambda tasks: tasks.task("x", queue="q", batch=2)(_items), "give it its own queue"),
        (lambda tasks: tasks.include(tasks), "cannot include itself"),
        (lambda _tasks: Tasks(prefix="a b"), "prefix: got"),
        (lambda tasks: tasks.task(_context), "parameter 'context' has no annotation: write 'context: Context'"),
        (lambda tasks: tasks.task(_ctx), "parameter 'ctx' has no annotation: write 'ctx: Context'"),
        (lambda tasks: tasks.task(_method), "it is a method, whose parameter 'self'"),
        (lambda _tasks: ANY_TASKS.task(fetch), "task: got a function instead of a registry: write 'tasks = Tasks()'"),
        (lambda tasks: tasks.task(retries=3), "there is no option 'retries'; the options are retry, queue, timeout,"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_fails_at_once(declare: Callable[[Tasks], Any], fault: str) -> None:
    """U1: what can never work is refused when the module is imported, in a sentence that says what is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        declare(Tasks())
    assert fault in str(caught.value)


def _items(names: list[str]) -> None: ...


def test_options_that_do_not_exist() -> None:
    """U1: a misspelt option of `using` is refused, with the names of those that exist."""
    declared = Tasks().task(fetch)
    with pytest.raises(
        InvalidInput, match=r"unknown option 'dely'.*allowed: delay, after, deadline"
    ):
        declared.using(dely=3)  # type: ignore[call-arg]  # that is the case


def test_using_changes_a_copy() -> None:
    """U1: `using` returns a copy with more options, and does not change the task or the copy it was called on."""
    declared = Tasks().task(fetch)
    urgent = declared.using(priority=9)
    later = urgent.using(delay=5)
    assert declared.changes == {}
    assert urgent.changes == {"priority": 9}
    assert later.changes == {"priority": 9, "delay": 5}


async def test_without_a_connection() -> None:
    """U1: a publish without a connection says the ways to get one."""
    declared = Tasks().task(fetch)
    with pytest.raises(
        NotConnected,
        match=r"using\(on=queue\).*inside a handler.*tasks\.connect\(.*tasks\.connect_sync",
    ):
        await declared.publish("x")
    with pytest.raises(NotConnected):
        declared.publish_sync("x")


async def test_registries_that_include_others() -> None:
    """U1: an included registry publishes through the connection of the other, and may declare more tasks later."""
    shop, mail = Tasks(), Tasks(prefix="mail.")
    shop.include(mail)
    send = mail.task("send")(fetch)
    assert list(shop.functions) == ["mail.send"]
    async with connect("memory") as queue, shop.connect(queue):
        handle = await send.publish("x")
        assert await queue.status("mail.send", handle.id) is not None
    with pytest.raises(ConfigurationError, match="cannot include itself"):
        mail.include(shop)
    other = Tasks(prefix="mail.")
    other.task("send")(fetch)
    with pytest.raises(ConfigurationError, match="taken"):
        shop.include(other)


async def test_tasks_that_share_a_queue() -> None:
    """U1: in a shared queue, a header names the task, and each runs in its own function."""
    tasks, seen = Tasks(), list[str]()

    @tasks.task("images.resize", queue="images")
    def resize(name: str) -> None:
        seen.append(f"resize {name}")

    @tasks.task("images.delete", queue="images")
    async def delete(context: Context, name: str) -> None:
        seen.append(f"delete {name} {context.key}")

    backend = MemoryBackend()
    worker = LocalWorker(tasks, backend=backend)
    assert worker.keys == ("images",)
    async with tasks.connect(Queue(backend)), working(worker):
        first, second = await resize.publish("a"), await delete.publish("b")
        await first.result(5)
        await second.result(5)
    assert sorted(seen) == ["delete b images", "resize a"]
