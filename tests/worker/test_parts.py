"""Small parts of the worker: backoff, inbox, threads, server address, handler registry and settings."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from taskqueue_core import Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.server_address import SOCKET_PATH, ServerAddress
from taskqueue_worker import Worker
from taskqueue_worker.base import _make_worker_id
from taskqueue_worker.server_link import Backoff
from taskqueue_worker.threads import Threads, ThreadsafeInbox


def test_backoff_doubles_from_at_once_to_the_cap() -> None:
    """The backoff starts with 0 and 0.1 seconds and doubles up to 5 seconds; a reset starts it again."""
    backoff = Backoff(uniform=lambda: 1.0)
    waits = [backoff.next() for _ in range(9)]
    assert waits == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    backoff.reset()
    assert backoff.next(at_once=False) == pytest.approx(0.1)
    assert backoff.next() == pytest.approx(0.2)
    backoff.reset(at_once=False)
    assert backoff.next() == pytest.approx(0.1)
    for _ in range(5000):
        assert backoff.next() <= 5.0


def test_backoff_is_jittered() -> None:
    """Fault G7: each wait has a random length between half and all of its step."""
    waits = []
    for _ in range(200):
        backoff = Backoff()
        backoff.next()
        waits.append(backoff.next())
    assert 0.05 <= min(waits) < 0.06
    assert 0.09 < max(waits) <= 0.1


async def test_a_mailbox_hands_over_in_order_and_in_batches() -> None:
    """The inbox passes items from several threads in few calls, and keeps the order of each thread."""
    batches: list[list[tuple[int, int]]] = []
    done = asyncio.Event()

    def handle(items: list[tuple[int, int]]) -> None:
        batches.append(items)
        if sum(map(len, batches)) == 4000:
            done.set()

    mailbox = ThreadsafeInbox(asyncio.get_running_loop(), handle)

    def post(who: int) -> None:
        for n in range(1000):
            mailbox.put((who, n))

    threads = [threading.Thread(target=post, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # The event loop is blocked while the threads run.
    assert batches == []
    await done.wait()
    assert len(batches) == 1
    for who in range(4):
        assert [n for w, n in batches[0] if w == who] == list(range(1000))


def test_a_mailbox_outlives_its_loop() -> None:
    """Putting an item after the event loop has been closed does nothing."""
    loop = asyncio.new_event_loop()
    mailbox: ThreadsafeInbox[int] = ThreadsafeInbox(loop, lambda _items: None)
    loop.close()
    mailbox.put(1)
    mailbox.put(2)


def test_threads_are_started_when_needed_and_end() -> None:
    """Threads are started as needed up to the maximum, and end when the pool is closed."""
    threads = Threads(3)
    names: set[str] = set()
    ready = threading.Barrier(4)

    def meet() -> None:
        names.add(threading.current_thread().name)
        ready.wait(30)

    for _ in range(3):
        threads.submit(meet)
    ready.wait(30)
    assert len(names) == 3
    running = [t for t in threading.enumerate() if t.name in names]
    assert all(thread.daemon for thread in running)
    threads.close()
    for thread in running:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("url", "uri", "shown"),
    [
        ("http://127.0.0.1:8420", "ws://127.0.0.1:8420", "http://127.0.0.1:8420"),
        ("https://queue.example.org/", "wss://queue.example.org", "https://queue.example.org"),
        ("https://h/prefix/", "wss://h/prefix", "https://h/prefix"),
        ("ws://[::1]:9" + SOCKET_PATH, "ws://[::1]:9", "ws://[::1]:9"),
        ("http://user:secret@h:1", "ws://user:secret@h:1", "http://h:1"),
    ],
)
def test_addresses(url: str, uri: str, shown: str) -> None:
    """A server address is converted to a websocket URL, and its displayed form contains no credentials."""
    address = ServerAddress.of(url)
    assert address.socket_uri == uri + SOCKET_PATH
    assert address.shown == shown
    assert repr(address) == f"ServerAddress({shown!r})"
    assert address.loopback is ("127.0.0.1" in url or "::1" in url)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8420", "ftp://h", "http://", "http://h:port", "http://h?q=1", "http://[::1"],
)
def test_addresses_that_are_none(url: str) -> None:
    """An invalid server address is refused when the worker is created."""
    with pytest.raises(ConfigurationError, match="must look like"):
        Worker(url=url)


def _generator() -> Any:
    yield 1


async def _async_generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("register", "fault"),
    [
        (lambda w: w.task("no spaces")(print), "name of the task: got"),
        (lambda w: w.task("")(lambda: 1), "name of the task: got"),
        (lambda w: (w.task("a")(lambda: 1), w.task("a")(lambda: 2)), "is taken"),
        (lambda w: w.task("a", timeout=0)(lambda: 1), "timeout"),
        (lambda w: w.task("a", timeout=float("nan"))(lambda: 1), "timeout"),
        (lambda w: w.task("a")(_generator), "generator"),
        (lambda w: w.task("a")(partial(_async_generator)), "generator"),
    ],
)
def test_registrations_that_are_refused(register: Callable[[Worker], object], fault: str) -> None:
    """An invalid handler is refused when it is registered, with a clear error."""
    with pytest.raises(ConfigurationError, match=fault):
        register(Worker())


def test_a_decorated_function_stays_itself() -> None:
    """A decorated function can still be called directly; its name is the default key.

    U1: ``@worker.task`` without a call registers the function as well.
    """
    worker = Worker(url="http://h")

    @worker.task
    def bare(n: int) -> int:
        return n - 1

    @worker.task()
    async def resize(image: str) -> str:
        return image

    @worker.task("other", timeout=3)
    def other(n: int) -> int:
        return n + 1

    assert (bare(1), other(1)) == (0, 2)
    assert worker.keys == ("bare", "resize", "other")


def test_asynchronous_handlers_are_recognised() -> None:
    """Asynchronous handlers are recognised, also as partial functions and as callable objects."""

    class Handler:
        async def __call__(self) -> None:
            """Do nothing."""

    async def act(n: int) -> None:
        """Do nothing."""

    tasks = Tasks()
    functions: list[Callable[..., Any]] = [act, partial(act, 1), Handler()]
    for number, function in enumerate(functions):
        assert tasks.task(f"k{number}")(function).is_async
    assert not tasks.task("sync")(lambda: None).is_async


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"prefetch": -1},
        {"concurrency": 10_000, "prefetch": 1},
        {"grace": -1},
        {"grace": float("nan")},
        {"worker_id": "no spaces"},
    ],
)
def test_a_worker_checks_its_options(options: dict[str, Any]) -> None:
    """Fault K4: invalid options are refused when the worker is created."""
    with pytest.raises(ConfigurationError):
        Worker(url="http://h", **options)


async def test_options_may_be_changed_before_serving() -> None:
    """Options that are changed before the start replace those of the constructor; all others stay."""
    worker = Worker(url="http://h", worker_id="a", concurrency=3, prefetch=2)
    worker.configure(url="http://other", concurrency=5)
    worker.configure()
    assert worker._address == ServerAddress.of("http://other")
    assert (worker._worker_id, worker._concurrency) == ("a", 5)
    with pytest.raises(ConfigurationError):
        worker.configure(concurrency=9_999)


async def test_a_worker_without_handlers_does_not_start() -> None:
    """A worker without handlers does not start, because it would receive no tasks."""
    with pytest.raises(ConfigurationError, match="no handlers"):
        await Worker(url="http://h").serve()


def test_worker_ids_are_unique_per_start() -> None:
    """Fault A12: worker ids are unique, even on hosts with the same name and process id."""
    ids = {_make_worker_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{1,199}", one) for one in ids)
