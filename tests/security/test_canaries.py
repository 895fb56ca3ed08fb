"""Marked secrets are sent to every input and must not appear in any output."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.logs import formatter
from taskqueue_core.server_address import ServerAddress
from taskqueue_core.tasks import Task
from taskqueue_remote import RemoteBackend
from taskqueue_server.auth.credentials import session_cookie
from taskqueue_worker import Worker
from tests.server.access import bearer, entry, write
from tests.server.support import Running, http, receipts, running, settings

GOOD = "tq_canary-good"
BAD = "tq_canary-bad"
TOKENS = (GOOD, BAD)
DATA = "canary-data"
PAGES = ("/", "/login", "/queues/k", "/queues/k/dead", "/workers", "/tasks/k/t1")
STATUS = ("/health", "/ready", "/metrics", "/v1/openapi.json", "/v1/workers", "/v1/limits")


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """Everything that the product logs at debug level, and the warnings of its HTTP server."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s %(exc_text)s %(args)s"))
    ours = logging.StreamHandler(stream)
    ours.setFormatter(formatter())
    product, program = logging.getLogger("taskqueue"), logging.getLogger("uvicorn")
    levels = product.level, program.level
    product.setLevel(logging.DEBUG)
    program.setLevel(logging.WARNING)
    for one in (handler, ours):
        product.addHandler(one)
        program.addHandler(one)
    yield stream
    for one in (handler, ours):
        product.removeHandler(one)
        program.removeHandler(one)
    product.setLevel(levels[0])
    program.setLevel(levels[1])


async def sockets(it: Running, said: list[str]) -> None:
    """Send the secrets in every input of a socket, and collect the errors that come back."""
    for options in (
        {"additional_headers": bearer(BAD)},
        {"query": f"?token={GOOD}"},
        {"query": f"?token={BAD}", "additional_headers": bearer(GOOD)},
        {"additional_headers": bearer(GOOD) | {"origin": f"https://{DATA}"}},
    ):
        with pytest.raises(InvalidStatus) as refused:
            await it.socket(**options)
        said.append(f"{refused.value} {refused.value.response}")
    for hello in ({"token": BAD}, {"token": GOOD, "holding": [DATA]}):
        with contextlib.suppress(ConnectionClosed):
            async with it.worker("w1", "k", credit=1, **hello) as worker:
                [receipt] = receipts(await worker.deliveries(1))
                await worker.send("progress", receipt=receipt, value=DATA)
                await worker.send("dead_letter", receipt=receipt, reason=DATA, error=DATA)
                await worker.settled(1)
                await worker.socket.send(f'{{"type":"ack","receipts":["{DATA}"],"results":{DATA}}}')
                await worker.closed()
                said += [repr(frame) for frame in worker.passed_over if frame["type"] == "error"]


async def test_nothing_comes_out(tmp_path: Path, logs: io.StringIO) -> None:
    """Security 15, 24 and 25: no token appears in a log, error, metric, page or repr.

    A payload appears only on the pages of its task.
    """
    said: list[str] = []
    answers: list[str] = []
    path = write(
        tmp_path / "tokens.toml", entry(GOOD, "ops"), entry("tq_weak", "w", ["publish"], ["x"])
    )
    async with running(tokens_file=path) as it, http(it) as client:

        async def ask(method: str, url: str, **more: Any) -> None:
            answer = await client.request(method, url, **more)
            text = f"{answer.headers} {answer.text}"
            (said if answer.status_code >= 400 or url in STATUS else answers).append(text)

        bad_headers = [bearer(BAD), {"cookie": session_cookie(BAD, secure=False).partition(";")[0]}]
        for headers in (*bad_headers, {"authorization": BAD}, {"authorization": f"Basic {BAD}"}):
            for url in (
                *STATUS,
                *PAGES,
                f"/v1/queues?token={BAD}",
                f"/{BAD}",
                f"/v1/tasks/{BAD}/x",
            ):
                await ask("GET", url, headers=headers)
        good = bearer(GOOD)
        await ask("POST", "/v1/tasks", headers=good, json={"key": "k", "id": "t1", "payload": DATA})
        for body in (
            f'{{"{DATA}"',
            f'{{"key":"{DATA} "}}',
            f'{{"key":"k","headers":{{"{DATA}":1}}}}',
        ):
            await ask("POST", "/v1/tasks", headers=good, content=body)
        await ask(
            "POST", "/v1/tasks", headers=bearer("tq_weak"), json={"key": "k", "payload": DATA}
        )
        await ask("PUT", "/v1/queues/k/settings", headers=good, content=f'{{"{DATA}":1}}')
        await ask("GET", f"/v1/queues?limit={DATA}", headers=good)
        await ask("GET", f"/v1/queues?{DATA}={DATA}", headers=good)
        await ask("GET", f"/v1/tasks/k/{DATA}%0d%0a", headers=good)
        await ask(
            "POST", "/login", content=f"token={BAD}&next=/", headers={"origin": it.server.url}
        )

        await sockets(it, said)
        path.write_text(f"[[token]]\nname = '{DATA}'\nsha256 = '{BAD}'\n", "utf-8")
        await it.context.access.reload()
        for url in (*STATUS, *PAGES):
            await ask("GET", url, headers=good)
        for thing in (
            it.context,
            it.context.access,
            it.context.settings,
            it.server,
            it.context.registry,
        ):
            said += [repr(thing), repr(vars(thing)) if not isinstance(thing, Settings) else ""]
        for one in asyncio.all_tasks():
            said.append(repr(one))

    everything = "\n".join((*said, *answers, logs.getvalue()))
    for token in TOKENS:
        assert token not in everything.replace(f"/{token}", ""), token
    assert DATA not in "\n".join(said).replace(f"/{DATA}", ""), (
        "a payload is in an error, a metric or a repr"
    )
    assert DATA not in logs.getvalue().replace(f"token 1 ({DATA})", "")
    assert logs.getvalue().count("previous tokens stay in force") == 2
    assert any("t1" in answer for answer in answers), "the pages were read"


async def test_addresses(monkeypatch: pytest.MonkeyPatch, logs: io.StringIO) -> None:
    """Security 15 and 24: a password in a URL and a token in the environment appear in no error, health or repr."""
    url = f"http://user:{DATA}@127.0.0.1:1/"
    said = [repr(ServerAddress.of(url))]
    monkeypatch.setenv("TASKQUEUE_TOKEN", GOOD)
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", url)
    loaded = load_settings(Settings)
    said += [repr(loaded.token), str(loaded.model_copy(update={"server_url": ""}))]
    remote = RemoteBackend(url, GOOD)
    said += [repr(remote), repr(vars(remote)), repr(await remote.health())]
    with pytest.raises(TaskQueueError) as away:
        await remote.publisher.publish(Task(key="k"))
    said += [str(away.value), repr(away.value), repr(Worker(url=url, token=GOOD))]
    await remote.aclose()

    monkeypatch.setenv("TASKQUEUE_REDIS_URL", f"redis://user:{DATA}@127.0.0.1:1/0")
    for limit in ("CONNECT", "ANSWER", "OPERATION"):
        monkeypatch.setenv(f"TASKQUEUE_REDIS_{limit}_TIMEOUT", "0.2")
    store = open_backend("redis", settings())
    with pytest.raises(TaskQueueError) as lost:
        async with asyncio.timeout(20):
            await store.publisher.publish(Task(key="k"))
    said += [
        str(lost.value),
        repr(lost.value),
        repr(await store.health()),
        repr(store),
        repr(vars(store)),
    ]
    await store.aclose()
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", f"redis://user:{DATA}@127.0.0.1:x/{DATA}")
    with pytest.raises(ConfigurationError) as wrong:
        open_backend("redis", settings())
    said += [str(wrong.value), repr(wrong.value), logs.getvalue()]
    assert DATA not in "\n".join(said)
    assert GOOD not in "\n".join(said)
