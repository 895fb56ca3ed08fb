"""Tests of the handshake with Prefect workers: tokens, subscriptions and refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from taskqueue_server.prefect import handshake, socket
from taskqueue_server.prefect.frames import Subscribe
from tests.prefect.support import KEY, Taker, publish_runs, task_run, url_of
from tests.server.access import entry, write
from tests.server.support import Running, eventually, http, problem, running

EVENTS = "/api/events/in"
TOKEN = "tq_of-a-worker-of-prefect"
NARROW = "tq_of-one-for-other-keys"
PUBLISHER = "tq_of-one-who-only-publishes"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Write a tokens file with a token for the key, one for other keys, and one that may only publish."""
    return write(
        tmp_path / "tokens.toml",
        entry(TOKEN, "worker", ["consume"], ["add-*"]),
        entry(NARROW, "other", ["consume"], ["sub-*"]),
        entry(PUBLISHER, "publisher", ["publish"]),
    )


def quiet(it: Running, path: str | None = None, **more: Any) -> Taker:
    """Return a worker that connects without sending anything."""
    return Taker(url_of(it, path) if path else url_of(it), quiet=True, **more)


class TestWithoutTokens:
    """A server that accepts every user of this machine."""

    async def test_a_worker_is_let_in_and_served(self) -> None:
        """E7: the handshake is the one that Prefect workers expect, and then the bare task run is sent."""
        async with running() as it, quiet(it) as worker:
            await worker.send("auth", token=None)
            assert json.loads(await worker.socket.recv()) == {"type": "auth_success"}
            await worker.send("subscribe", keys=[KEY], client_id="host-1")
            await eventually(lambda: it.context.registry.connections("host-1"))
            payload = json.dumps(task_run(unknown={"a": [1, None]}, tags=["x"])).encode()
            await it.publish("a", key=KEY, payload=payload)
            assert await worker.socket.recv(decode=False) == payload
            await worker.ack()
            await it.reaches(KEY, done=1)

    async def test_a_token_comes_first(self) -> None:
        """E7: a first frame other than auth closes the connection with 4001, not 1008, which would end the worker."""
        subscribe = '{"type":"subscribe","keys":["k"],"client_id":"c"}'
        async with running() as it:
            for said in (subscribe, "{}", '{"token":null}', "[]", "x", "", b'{"type":"auth"}'):
                async with quiet(it) as worker:
                    await worker.socket.send(said)
                    code, reason = await worker.closed()
                    assert code == 4001, said
                    assert reason.startswith("auth: ")

    async def test_a_subscription_is_whole(self) -> None:
        """E7: a subscription without a valid type, keys or client_id closes the connection with the code 4001."""
        whole: dict[str, Any] = {"type": "subscribe", "keys": [KEY], "client_id": "c"}
        frames = [{n: v for n, v in whole.items() if n != name} for name in whole]
        bad: tuple[dict[str, Any], ...]
        bad = ({"keys": KEY}, {"client_id": 3}, {"keys": []}, {"keys": ["a key"]}, {"type": "ack"})
        frames += [whole | {"keys": [f"k{n}" for n in range(1001)]}, *(whole | one for one in bad)]
        async with running() as it:
            for frame in frames:
                async with quiet(it) as worker:
                    await worker.authenticate()
                    await worker.socket.send(json.dumps(frame))
                    code, reason = await worker.closed()
                    assert code == 4001, frame
                    assert reason.startswith("subscribe: ")
            await eventually(lambda: len(it.context.registry) == 0)

    @pytest.mark.parametrize("said", [0, 1])
    async def test_who_says_nothing_is_sent_away(
        self, said: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault G11: a connection that does not complete the handshake in time is closed."""
        monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.1)
        async with running() as it, quiet(it) as worker:
            if said:
                await worker.authenticate()
            assert (await worker.closed())[0] == 4408

    async def test_pages_and_other_names_are_refused(self) -> None:
        """Security 4: host names, origins and subprotocols are checked as for the server's own WebSocket."""
        async with running() as it:
            for path in (None, EVENTS):
                url = url_of(it, path) if path else url_of(it)
                port = int(it.server.url.rpartition(":")[2])
                elsewhere = url.replace("127.0.0.1", "queue.example")
                for address, headers, names, status in (
                    (url, {"Origin": "http://127.0.0.1"}, ["prefect"], 403),
                    (elsewhere, {}, ["prefect"], 421),
                    (url, {}, ["taskqueue.v1"], 426),
                    (url, {}, [], 426),
                ):
                    with pytest.raises(InvalidStatus) as refused:
                        await connect(
                            address,
                            host="127.0.0.1",
                            port=port,
                            subprotocols=[Subprotocol(name) for name in names] or None,
                            additional_headers=headers,
                            proxy=None,
                        )
                    assert refused.value.response.status_code == status

    async def test_a_worker_is_never_refused_by_a_status(self) -> None:
        """Fault A7: a server that cannot serve a worker accepts the connection and then closes it.

        A response 503 would end the worker.
        """
        async with running() as it:
            it.context.draining.set()
            async with quiet(it) as worker:
                assert (await worker.closed())[0] == 1012
            it.context.draining.clear()
            it.context.registry._max_connections = 0
            async with quiet(it) as worker:
                assert (await worker.closed())[0] == 1013

    @pytest.mark.parametrize(
        ("client_id", "worker_id"),
        [
            ("host-17", "host-17"),
            ("Ann's laptop-1", "Ann_s_laptop-1"),
            ("-a", "_a"),
            ("", "_"),
            ("é" * 300, "_" * 200),
        ],
    )
    def test_any_host_may_have_workers(self, client_id: str, worker_id: str) -> None:
        """Characters of a client id that a worker id may not contain are replaced."""
        assert Subscribe("subscribe", keys=[], client_id=client_id).worker_id == worker_id


class TestTokens:
    """Security 1, 2 and 6: access is restricted by tokens on this WebSocket too."""

    async def test_a_good_token(self, tokens: Path) -> None:
        """Security 1: a worker sends its token in its first frame, or a proxy sends it in a header."""
        async with running(tokens_file=tokens) as it:
            for shown in (
                {"token": TOKEN},
                {"token": TOKEN, "headers": {"Authorization": "Basic dXNlcjpwYXNz"}},
                {"headers": {"Authorization": f"Bearer {TOKEN}"}},
            ):
                async with Taker(url_of(it), **shown) as worker:
                    await publish_runs(it, name := str(len(shown)) + str(shown.get("token")))
                    assert await worker.take(1) == [name]

    @pytest.mark.parametrize("token", [None, "", "wrong", PUBLISHER, "x" * 5000])
    async def test_a_bad_token(self, token: str | None, tokens: Path) -> None:
        """Fault K1: an invalid token closes the connection with 1008 and a message, so that the worker ends."""
        async with running(tokens_file=tokens) as it:
            for path in (None, EVENTS):
                async with quiet(it, path) as worker:
                    await worker.send("auth", token=token)
                    assert await worker.closed() == (1008, "a valid token is required")
            headers = {"Authorization": "Bearer wrong"}
            async with quiet(it, headers=headers) as worker:
                await worker.send("auth", token=TOKEN)
                assert (await worker.closed())[0] == 1008

    async def test_other_keys(self, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Security 2: a token gives access to its own keys only.

        A refusal is delayed, so that reconnects do not flood the server.
        """
        monkeypatch.setattr(socket, "FORBIDDEN_SECONDS", 0.2)
        loop = asyncio.get_running_loop()
        async with running(tokens_file=tokens) as it:
            await publish_runs(it, "a")
            for keys in ((KEY,), ("sub-1", KEY)):
                began = loop.time()
                async with Taker(url_of(it), *keys, token=NARROW) as worker:
                    code, reason = await worker.closed()
                    assert (code, reason) == (1008, "this token may not consume these keys")
                    assert loop.time() - began > 0.2
            monkeypatch.setattr(socket, "FORBIDDEN_SECONDS", 60)
            async with Taker(url_of(it), token=NARROW):
                await eventually(lambda: it.context.registry.connections("host-1"))
            await eventually(lambda: len(it.context.registry) == 0)
            async with Taker(url_of(it), token=NARROW) as worker:
                await eventually(lambda: it.context.registry.connections("host-1"))
                it.context.draining.set()
                assert (await worker.closed())[0] == 1012
            assert (await it.ledger(KEY)).waiting == 1

    async def test_a_token_that_is_taken_back(self, tokens: Path) -> None:
        """Security 6: connections are closed when their token is revoked, and an unacked run is returned."""
        async with running(tokens_file=tokens) as it:
            await publish_runs(it, "a")
            async with (
                Taker(url_of(it), token=TOKEN) as worker,
                quiet(it, EVENTS, token=TOKEN) as events,
            ):
                await events.authenticate()
                await worker.receive()
                write(tokens)
                it.context.access.ask_to_reload()
                assert (await worker.closed())[0] == 1008
                assert (await events.closed())[0] == 1008
            await it.reaches(KEY, waiting=1)


class TestOtherRequests:
    """HTTP requests of workers, in addition to the WebSocket."""

    async def test_requests(self, tokens: Path) -> None:
        """Workers can read the server's version and health, and these paths are not part of the API description."""
        async with running(tokens_file=tokens, prefect_version="3.8.8") as it, http(it) as client:
            version = await client.get("/api/admin/version")
            assert (version.status_code, version.json()) == (200, "3.8.8")
            assert (await client.get("/api/health")).json() is True
            assert (await client.get("/api/ready")).status_code == 200
            problem(await client.get("/api/csrf-token?client=1"), 404, "not_found")
            it.context.draining.set()
            problem_free = await client.get("/api/ready")
            assert problem_free.status_code == 503
            headers = {"Authorization": f"Bearer {TOKEN}"}
            described = (await client.get("/v1/openapi.json", headers=headers)).json()
            assert not [path for path in described["paths"] if path.startswith("/api/")]

    async def test_states_are_read_and_dropped(self) -> None:
        """Workers can send state events, which are ignored; without this path their logs would fill with errors."""
        async with running() as it, quiet(it, EVENTS) as worker:
            await worker.authenticate()
            for _ in range(100):
                await worker.send("event", payload="x" * 1000)
            await (await worker.socket.ping())
            assert len(it.context.registry) == 1
            it.server.stop()
            assert (await worker.closed())[0] == 1012
