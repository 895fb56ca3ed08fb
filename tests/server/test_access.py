"""Authentication at the server: which tokens are accepted, where they are sent, and how long they stay valid."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, Identity
from taskqueue_server.auth.access import check_host, notice
from taskqueue_server.auth.credentials import session_cookie
from taskqueue_server.worker_socket.admission import HELLO_SECONDS
from tests.server.access import (
    ADMIN,
    ALL,
    A,
    B,
    Plugin,
    bearer,
    entry,
    everybody,
    guarded,
    spoil,
    write,
)
from tests.server.support import PROBLEM, Running, eventually, http, problem, running, settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file with three tokens."""
    return everybody(tmp_path / "tokens.toml")


async def refused(it: Running, headers: Mapping[str, str], **options: Any) -> tuple[int, str]:
    """Return the HTTP status of a refused handshake and the code in its problem document."""
    with pytest.raises(InvalidStatus) as caught:
        async with it.socket(additional_headers=headers, **options):
            pass
    response = caught.value.response
    assert response.headers["content-type"] == PROBLEM
    assert response.body is not None
    return response.status_code, response.body.decode().partition('"code":"')[2].partition('"')[0]


async def closed(it: Running, *keys: str, **hello: Any) -> tuple[int, str]:
    """Return the code and the reason of the close that answers a hello."""
    with pytest.raises(ConnectionClosed) as caught:
        async with it.worker("w1", *keys, **hello):
            pass
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


class TestSocket:
    """Authentication of websockets, by a header of the handshake or by the hello."""

    async def test_a_good_token(self, path: Path) -> None:
        """Fault K1 and security 1: a worker may send its token in the header or in the hello frame."""
        async with guarded(path) as it:
            async with it.worker("w1", "a", headers=bearer(A)) as worker:
                assert worker.welcome["lease"]
            async with it.worker("w1", "a", token=A) as worker:
                assert worker.welcome["lease"]

    @pytest.mark.parametrize(
        "shown",
        [
            bearer("tq_wrong"),
            bearer(A + "x"),
            bearer(""),
            {"Authorization": f"Basic {A}"},
            {"Authorization": A},
            {"Authorization": ""},
        ],
    )
    async def test_a_bad_token_is_refused_before_the_handshake(
        self, path: Path, shown: dict[str, str]
    ) -> None:
        """Fault K1 and security 1: a bad token is refused with 401, and no connection is made."""
        async with guarded(path) as it:
            assert await refused(it, shown) == (401, "unauthenticated")
            assert len(it.context.registry) == 0

    async def test_two_headers(self, path: Path) -> None:
        """A request with two Authorization headers is refused, because proxies may disagree about which one applies."""
        async with guarded(path) as it:
            shown = f"Authorization: Bearer {A}\r\n".encode()
            head = b"GET /v1/queues HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            assert await it.answers(head + shown + b"\r\n") == [200]
            assert await it.answers(head + 2 * shown + b"\r\n") == [401]

    async def test_an_expired_token(self, path: Path) -> None:
        """Fault K1: a token is refused after it has expired."""
        write(path, entry(A, expires_at=time.time() - 1))
        async with guarded(path) as it:
            assert await refused(it, bearer(A)) == (401, "unauthenticated")
            assert await closed(it, "a", token=A) == (4401, "unauthenticated")

    async def test_another_scope(self, path: Path) -> None:
        """Fault K1 and security 2: a valid token is refused for a key or verb that it does not grant."""
        write(path, entry(A, keys=["a"]), entry(B, verbs=["publish", "admin"]))
        async with guarded(path) as it:
            assert await refused(it, bearer(B)) == (403, "forbidden")
            assert await closed(it, "b", token=B) == (4401, "unauthenticated")
            for keys in (("b",), ("a", "b")):
                assert await closed(it, *keys, headers=bearer(A)) == (4401, "forbidden")
                assert await closed(it, *keys, token=A) == (4401, "forbidden")
            # The token in the header decides, even if the hello contains a better one.
            write(path, entry(A, keys=["a"]), entry(B))
            assert await it.context.access.reload()
            assert await closed(it, "b", headers=bearer(A), token=B) == (4401, "forbidden")

    @pytest.mark.parametrize("query", ["?token=" + A, "?access_token=" + A + "&x=1", "?x"])
    async def test_a_token_in_the_address(
        self, path: Path, query: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Fault K1 and security 1: a request with a token in its URL is refused before the handshake.

        The token appears in no log of the server.
        """
        caplog.set_level(logging.INFO)
        async with guarded(path) as it:
            shown = {} if A in query else bearer(A)
            assert await refused(it, shown, query=query) == (400, "query")
        ours = [r for r in caplog.records if r.name.startswith("taskqueue")]
        assert not [record for record in ours if A in record.getMessage()]

    async def test_a_session_is_no_token_here(self, path: Path) -> None:
        """Security 4: a websocket is never authenticated by a cookie, because browsers send cookies from any page."""
        cookie = session_cookie(A, secure=False).partition(";")[0]
        async with guarded(path) as it:
            assert await closed(it, "a", headers={"Cookie": cookie}) == (4401, "unauthenticated")

    @pytest.mark.parametrize(
        ("origin", "listed", "welcome"),
        [
            (None, [], True),
            ("https://queue.example", ["https://queue.example"], True),
            ("https://queue.example", [], False),
            ("http://queue.example", ["https://queue.example"], False),
            ("https://queue.example.evil", ["https://queue.example"], False),
            ("https://queue.example:444", ["https://queue.example"], False),
            ("null", ["https://queue.example"], False),
            ("", ["https://queue.example"], False),
            ("http://127.0.0.1:8420", [], False),
        ],
    )
    async def test_origins(
        self, path: Path, origin: str | None, listed: list[str], *, welcome: bool
    ) -> None:
        """Security 4: a handshake with a token needs no Origin header or one on the list; any other gets 403."""
        headers = bearer(A) | ({} if origin is None else {"Origin": origin})
        async with guarded(path, origins=frozenset(listed)) as it:
            if welcome:
                async with it.worker("w1", "a", headers=headers):
                    pass
            else:
                assert await refused(it, headers) == (403, "origin")

    @pytest.mark.fast_clock
    async def test_strangers_do_not_keep_workers_out(self, path: Path) -> None:
        """Fault G11 and security 1: the server limits the number of sockets that have sent no token.

        When the limit is reached, a socket is accepted in place of the oldest one, which had time to send a token.
        """
        async with guarded(path, unauthenticated_per_address=3) as it:
            strangers = [await it.socket() for _ in range(3)]
            with pytest.raises((ConnectionError, InvalidMessage)):
                await it.socket()
            await asyncio.sleep(1.1)
            async with it.worker("w1", "a", headers=bearer(A)):
                await strangers[0].wait_closed()
            for stranger in strangers[1:]:
                assert stranger.close_code is None
                await stranger.close()

    @pytest.mark.fast_clock
    async def test_strangers_may_not_stay(self, path: Path) -> None:
        """Fault G11: a client that sends no hello in time gets the error `no_hello`, even with a valid token."""
        async with (
            guarded(path) as it,
            it.socket() as stranger,
            it.socket() as chatty,
            it.socket(additional_headers=bearer(A)) as known,
        ):
            await chatty.send('{"type":"from_the_future"}')
            for socket in (stranger, chatty, known):
                async with asyncio.timeout(HELLO_SECONDS + 1):
                    with suppress(ConnectionClosed):
                        while True:
                            last = json.loads(await socket.recv())
                assert (last["type"], last["code"]) == ("error", "no_hello")
                assert (socket.close_code, socket.close_reason) == (4408, "no_hello")
            await eventually(lambda: len(it.context.registry) == 0)


async def test_plugins_go_first_and_the_file_knows_the_others(path: Path) -> None:
    """Plugins and the token file can be used together: a plugin is asked first, and then the file."""
    plugin = Plugin()
    async with running(plugin.backend(), tokens_file=path) as it, http(it) as client:
        for token in ("good", ADMIN):
            assert (await client.get("/v1/queues", headers=bearer(token))).status_code == 200
        for headers in ({}, bearer("bad")):
            answer = await client.get("/v1/queues", headers=headers)
            problem(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "queue.example", ""])  # noqa: S104 - refused
def test_no_open_server_for_others(host: str, path: Path) -> None:
    """Security 3: a server without authentication listens on loopback only.

    The error about another host says how to create a token.
    """
    hooks = Hooks()
    with pytest.raises(ConfigurationError, match="taskqueue token new"):
        check_host(settings(host=host), hooks)
    check_host(settings(host=host, tokens_file=path), hooks)
    hooks.register(Plugin())
    check_host(settings(host=host), hooks)


def test_an_open_server_says_so(path: Path) -> None:
    """Security 3: at its start, a server without authentication warns that every user of the machine can use it."""
    hooks = Hooks()
    for host in ("127.0.0.1", "localhost", "::1", "127.8.0.1"):
        check_host(settings(host=host), hooks)
    level, text = notice(settings(), hooks) or (0, "")
    assert (level, "every user of this machine" in text) == (logging.INFO, True)
    assert notice(settings(tokens_file=path), hooks) is None
    hooks.register(Plugin())
    assert notice(settings(), hooks) is None


def test_plain_text_is_warned_of(path: Path) -> None:
    """Security 4: a server that other machines reach without TLS warns at its start, unless a proxy ends TLS."""
    reached: dict[str, Any] = {"host": "0.0.0.0", "tokens_file": path}  # noqa: S104 - it is not opened
    level, text = notice(settings(**reached), Hooks()) or (0, "")
    assert (level, "TASKQUEUE_TLS_CERTIFICATE" in text) == (logging.WARNING, True)
    assert notice(settings(**reached, tls_certificate=path), Hooks()) is None
    assert (
        notice(settings(**reached, origins=frozenset({"https://queue.example"})), Hooks()) is None
    )
    assert notice(settings(tokens_file=path), Hooks()) is None


@pytest.mark.parametrize(
    ("host", "allowed", "status"),
    [
        ("queue.example", [], 200),
        ("queue.example", ["queue.example"], 200),
        ("Queue.Example:8420", ["queue.example"], 200),
        ("queue.example:8420", ["queue.example:8420"], 200),
        ("queue.example:1", ["queue.example:8420"], 421),
        ("127.0.0.1", ["queue.example"], 421),
        ("queue.example.evil", ["queue.example"], 421),
    ],
)
async def test_names(path: Path, host: str, allowed: list[str], status: int) -> None:
    """With authentication, a server accepts the host names on its list, or every host name if there is no list."""
    async with guarded(path, allowed_hosts=frozenset(allowed)) as it, http(it) as client:
        headers = bearer(ADMIN) | {"Host": host}
        assert (await client.get("/v1/queues", headers=headers)).status_code == status


async def test_a_bad_file_is_no_server(path: Path) -> None:
    """A server whose token file cannot be read does not start."""
    spoil(path, "[[")
    with pytest.raises(ConfigurationError, match="tokens file"):
        async with guarded(path):
            pass


def test_everything_is_a_verb() -> None:
    """The verbs of an identity are the same as the verbs of the token file."""
    assert Identity(name="n").verbs == frozenset(ALL)
