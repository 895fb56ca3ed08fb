"""Tests of the command ``taskqueue dispatch demo``: its servers, its faults, and its final report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from taskqueue_cli.demo_frame.view import LiveView
from taskqueue_core.capabilities import Endpoint, EndpointInfo
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_dispatch.demo.plan import DemoOptions, make_plan
from taskqueue_dispatch.demo.progress import JobsProgress, ModelRow, _marks, heading
from taskqueue_dispatch.demo.report import (
    Callbacks,
    Crash,
    DispatchDemoReport,
    FalseReport,
    ModelReport,
)
from taskqueue_dispatch.demo.server import run_server
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_server.routing.extensions import Extension
from tests.redis.backends import opened
from tests.redis.servers import RedisServer
from tests.server.support import settings

JOBS = 60
PATIENCE = 120
AT_ONCE = 25
"""seconds in which an interrupted demo must end; it takes longer if it waits for a store that is already gone"""


@contextmanager
def demo(folder: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo in a process session of its own, with its temporary files in ``folder``."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TASKQUEUE_")}
    with subprocess.Popen(
        [sys.executable, "-m", "taskqueue_cli", "dispatch", "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=kept | {"TMPDIR": str(folder)} | variables,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return environment variables that select an empty store: none for memory, otherwise a real Redis."""
    if request.param == "memory":
        return {}
    server: RedisServer = request.getfixturevalue("redis_server")
    prefix: str = request.getfixturevalue("redis_prefix")
    return {"TASKQUEUE_REDIS_URL": server.url, "TASKQUEUE_REDIS_PREFIX": prefix}


@pytest.mark.parametrize(
    "store", [pytest.param("memory", marks=pytest.mark.long), "redis"], indirect=True
)
def test_every_job_is_accounted_for(store: dict[str, str], tmp_path: Path) -> None:
    """C26, C23, C7, C16, law 1, fault I1.

    Every job is done, or failed with its reason; none is completed twice; every callback is delivered. The demo has
    synchronous, polled and pushing models, jobs that fail, a server that crashes, and a server that denies its running
    jobs.
    """
    word = "redis" if store else "memory"
    words = ("--json", "--jobs", str(JOBS), "--backend", word, "--seed", "7")
    with demo(tmp_path, *words, **store) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    told = json.loads(out)
    assert all(check["holds"] for check in told["checks"]), told["checks"]
    assert (told["ok"], told["backend"], told["jobs"]) == (True, word, JOBS)
    models = told["models"]
    assert [one["manner"] for one in models] == ["sync", "async, polled", "async, pushed"]
    assert sum(one["done"] + one["failed"] for one in models) == JOBS
    assert all(one["ledger"]["balanced"] for one in models)
    assert told["reasons"] == {"max_retries_exceeded": 3}
    assert told["crash"]["running"] == told["crash"]["recovered"] >= 1
    assert told["outcomes"]["leased"] + told["outcomes"]["queued"] == JOBS
    assert told["callbacks"]["refused"] >= 1
    assert "gpu-3 crashed" in err
    assert list(tmp_path.iterdir()) == []


async def test_a_store_with_a_dispatcher_is_left_alone(
    redis_server: RedisServer, redis_prefix: str, tmp_path: Path
) -> None:
    """The demo refuses a store that a dispatcher uses, because it would receive that dispatcher's callbacks (law 1)."""
    async with opened(redis_server.url, redis_prefix) as backend:
        endpoint = Endpoint(model="theirs", server="gpu", url="http://127.0.0.1:1/", slots=1)
        await backend.slots.register(endpoint)
        before = await backend.slots.inspect()
        variables = {
            "TASKQUEUE_REDIS_URL": redis_server.url,
            "TASKQUEUE_REDIS_PREFIX": redis_prefix,
        }
        with demo(tmp_path, "--json", "--backend", "redis", **variables) as process:
            out, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
        assert process.returncode == 2
        assert "--backend embedded" in json.loads(out)["error"]["detail"]
        assert await backend.slots.inspect() == before


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGINT, "embedded"),
        pytest.param(signal.SIGTERM, "memory", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_what_was_started(
    number: signal.Signals, word: str, tmp_path: Path
) -> None:
    """After SIGINT or SIGTERM the demo ends all its processes in order and removes its files."""
    with demo(tmp_path, "--backend", word) as process:
        assert process.stdout is not None
        while "all healthy" not in (line := process.stdout.readline()):
            assert line, process.stderr and process.stderr.read()
        process.send_signal(number)
        _, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


async def test_its_server_lets_go_before_the_store_goes() -> None:
    """If a signal has begun to stop the demo's server, the server still ends in order, before its store does."""
    over = asyncio.Event()

    @asynccontextmanager
    async def slow(_: object) -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0.7)  # longer than an immediate end would wait
        over.set()

    server = ServerProcess(
        MemoryBackend(), settings(), extensions=[Extension(name="slow", open=slow)]
    )

    async def work() -> None:
        server.stop()  # as a signal handler does
        await asyncio.Event().wait()

    await asyncio.gather(asyncio.create_task(run_server(server, work)), return_exceptions=True)
    assert over.is_set()


def test_the_plan_of_a_seed() -> None:
    """The same seed gives the same jobs, except for the name of the run; another seed gives other jobs."""

    def told(seed: int) -> list[object]:
        return [(job.name, job.seconds, job.fails, job.tenant) for job in make_plan(80, seed).jobs]

    assert told(1) == told(1)
    assert told(1) != told(2)
    assert make_plan(80, 1).run != make_plan(80, 1).run
    assert sum(job.fails < 0 for job in make_plan(80, 1).jobs) == 3


def report(**changes: object) -> DispatchDemoReport:
    """Return the report of a successful run, with changes to its only model."""
    model = ModelReport(
        name="m", mode="sync", slots=2, jobs=5, done=4, failed=1, retried=2, redelivered=1,
        lost=0, duplicates=0, wrong=0, wait_p50=0.1, wait_p95=0.2, utilisation=0.9,
        ledger=Ledger(published=5, done=4, dead=1),
    )  # fmt: skip
    return DispatchDemoReport(
        backend="memory",
        seed=0,
        models=(msgspec.structs.replace(model, **changes),),
        outcomes={"leased": 2, "queued": 3},
        resent=1,
        crash=Crash(server="gpu-3", running=1, recovered=1),
        false_report=FalseReport(server="gpu-1", denied=1),
        poison=1,
        reasons={"max_retries_exceeded": 1},
        callbacks=Callbacks(expected=2, delivered=2, refused=1, forged=0),
        held=0,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"done": 3},
        {"lost": 1},
        {"duplicates": 1},
        {"wrong": 1},
        {"crowded": ("gpu-1",)},
        {"ledger": Ledger(published=6, done=4, dead=1)},
        {"ledger": Ledger(published=6, done=5, dead=1)},
    ],
)
def test_what_is_wrong_is_found(changes: dict[str, object]) -> None:
    """A missing, duplicated or wrong job, or a wrong ledger, makes the report fail (law 1, C26)."""
    assert report().ok
    assert not report(**changes).ok


@pytest.mark.parametrize(
    "changes",
    [
        {"held": 1},
        {"crash": Crash(server="gpu-3", running=2, recovered=1)},
        {"crash": Crash(server="gpu-3", running=0, recovered=0)},
        {"false_report": FalseReport(server="gpu-1", denied=0)},
        {"callbacks": Callbacks(expected=2, delivered=1, refused=1, forged=0)},
        {"callbacks": Callbacks(expected=2, delivered=2, refused=1, forged=1)},
        {"poison": 2},
    ],
)
def test_what_did_not_happen_is_found(changes: dict[str, object]) -> None:
    """A leaked slot, a lost job, or a missing or forged callback makes the report fail (C26, B7)."""
    assert not msgspec.structs.replace(report(), **changes).ok


def test_overdue_slots_that_are_detached() -> None:
    """The live view marks overdue slots whether they are assigned or detached (B8, U26)."""
    endpoint = Endpoint(model="chat", server="gpu-1", url="http://127.0.0.1:1/", slots=4)
    info = EndpointInfo(endpoint=endpoint, healthy=True, assigned=1, detached=2, overdue=2)
    assert _marks(info).plain == "▣▲▲□"
    info = msgspec.structs.replace(info, assigned=2, detached=1, overdue=1)
    assert _marks(info).plain == "■▣▲□"


def test_the_live_view() -> None:
    """The live view draws slots by state and queues with their counts, and ends with the report (B8)."""
    console = Console(force_terminal=True, width=110, height=40, record=True)
    endpoint = Endpoint(model="chat", server="gpu-1", url="http://127.0.0.1:1/", slots=5)
    info = EndpointInfo(
        endpoint=endpoint, healthy=True, unassigned=1, assigned=2, detached=1, overdue=1
    )
    ledger = Ledger(published=9, waiting=4, done=5)
    stats = QueueStats(key="q", ledger=ledger, retried=2)
    model = ModelRow(name="chat", jobs=9, stats=stats)
    options = DemoOptions(backend="memory", jobs=60)
    view = LiveView(console)
    with view.begin(heading(options, make_plan(60, 0))):
        view.event("something happened")
        view.update(JobsProgress(endpoints=(info,), models=(model,), now=0.0, callbacks=3))
        with console.capture() as capture:
            console.print(view._live.renderable)
        shown = Text.from_ansi(capture.get()).plain
        view.end(report())
    assert re.search("gpu-1 +chat +■▣▲▪□", shown)
    assert re.search("chat +[━╸╺]+ +5 / 9 +4 +2 +0 +0", shown)
    text = console.export_text()
    assert "something happened" in text
    assert "Every job is accounted for." in text
