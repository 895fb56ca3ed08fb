"""Authentication of browsers: session cookies, and requests from pages of other sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from taskqueue_server.auth.credentials import (
    by_cookie,
    login_cookie,
    logout_cookie,
    secret_of,
    session_cookie,
    set_session,
    token_of,
)
from taskqueue_server.auth.sessions import Session
from tests.server.access import ADMIN, A, bearer, everybody
from tests.server.support import Running, http, problem, running

PAUSE = "/v1/queues/a/pause"


def request(scheme: str = "http", **headers: str) -> Request:
    """Return a request to ``host``."""
    told = {"host": "host", **headers}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    scope: dict[str, Any] = {"type": "http", "scheme": scheme, "path": "/", "headers": raw}
    return Request(scope | {"query_string": b"", "server": ("host", 80)})


def shown(cookie: str) -> str:
    """Return the Cookie header that a browser sends after this ``Set-Cookie`` header."""
    return cookie.partition(";")[0]


async def signed_in(it: Running, token: str) -> str:
    """Start a session, and return the Cookie header that a browser then sends."""
    secret = await it.context.access.sessions.start(token)
    return shown(session_cookie(secret, secure=False))


class TestCookie:
    """Content and attributes of the session cookie."""

    @pytest.mark.parametrize("secure", [True, False])
    def test_there_and_back(self, *, secure: bool) -> None:
        """A browser sends the cookie back, and neither scripts nor other sites can read it."""
        cookie = session_cookie("s", secure=secure)
        asked = request("https" if secure else "http", cookie=shown(cookie))
        assert secret_of(asked) == "s"
        assert token_of(asked) is None
        assert by_cookie(asked)
        words = cookie.split("; ")[1:]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(words)
        assert ("Secure" in words) == cookie.startswith("__Host-") == secure
        assert "Domain" not in cookie

    def test_the_header_goes_first(self) -> None:
        """A token in the header takes precedence over a session cookie.

        Another site can make a browser send the cookie, but not the header.
        """
        cookie = shown(session_cookie(A, secure=False))
        asked = request(cookie=cookie, authorization=f"Bearer {ADMIN}")
        set_session(asked, Session("name", A))
        assert token_of(asked) == ADMIN
        assert not by_cookie(asked)
        assert token_of(request(cookie=cookie, authorization="Basic x")) is None

    def test_over_tls_only_the_safe_name_counts(self) -> None:
        """Over TLS only the cookie with the ``__Host-`` prefix counts.

        Another host of the same domain can set a cookie without the prefix.
        """
        assert secret_of(request("https", cookie=shown(session_cookie(A, secure=False)))) is None

    @pytest.mark.parametrize(
        ("scheme", "origin", "listed", "secure"),
        [
            ("https", "https://host", [], True),
            ("http", "http://host", [], False),
            ("http", "https://host", ["https://host"], True),
            ("http", "https://host", [], False),
            ("http", "https://elsewhere", ["https://elsewhere"], False),
        ],
    )
    def test_behind_a_proxy(
        self, scheme: str, origin: str, listed: list[str], *, secure: bool
    ) -> None:
        """The cookie is marked Secure only if the browser uses TLS, which is known from an origin on the list."""
        asked = request(scheme, origin=origin)
        cookie = login_cookie(asked, A, listed)
        assert cookie.startswith("__Host-") == secure
        back = request(scheme, cookie=shown(cookie))
        assert secret_of(back) == A
        out = logout_cookie(back)
        assert out.partition("=")[0] == cookie.partition("=")[0]
        assert "Max-Age=0" in out
        assert secret_of(request(scheme, cookie=shown(out))) is None


class TestOtherSites:
    """Security 4: a page of another site can neither read nor change anything.

    This holds although the browser sends the session cookie with its requests.
    """

    @pytest.mark.parametrize(
        ("origin", "status"),
        [
            ("own", 200),
            (None, 403),
            ("null", 403),
            ("https://evil.example", 403),
            ("https://listed.example", 403),
        ],
    )
    async def test_doing_something(self, tmp_path: Path, origin: str | None, status: int) -> None:
        """Security 4: with a session cookie, an unsafe method requires the Origin of this server."""
        path = everybody(tmp_path / "tokens.toml")
        listed = frozenset({"https://listed.example"})
        async with running(tokens_file=path, origins=listed) as it, http(it) as client:
            cookie = await signed_in(it, ADMIN)
            headers = {"cookie": cookie}
            if origin:
                headers["origin"] = it.server.url if origin == "own" else origin
            answer = await client.post(PAUSE, headers=headers)
            assert answer.status_code == status
            if status == 403:
                problem(answer, 403, "origin")
            assert (await it.backend.control.settings("a")).paused == (status == 200)  # type: ignore[attr-defined]

    async def test_looking(self, tmp_path: Path) -> None:
        """A session cookie may read without an Origin header, which browsers omit, but not with a foreign one."""
        path = everybody(tmp_path / "tokens.toml")
        async with running(tokens_file=path) as it, http(it) as client:
            headers = {"cookie": await signed_in(it, ADMIN)}
            assert (await client.get("/v1/queues", headers=headers)).status_code == 200
            headers["origin"] = "https://evil.example"
            problem(await client.get("/v1/queues", headers=headers), 403, "origin")
            headers = {"cookie": shown(session_cookie("tq_wrong", secure=False))}
            problem(await client.get("/v1/queues", headers=headers), 401, "unauthenticated")

    @pytest.mark.parametrize(
        ("origin", "listed", "status"),
        [
            (None, [], 200),
            ("own", [], 200),
            ("https://queue.example", ["https://queue.example"], 200),
            ("https://queue.example", [], 403),
            ("null", ["https://queue.example"], 403),
        ],
    )
    async def test_origins(
        self, tmp_path: Path, origin: str | None, listed: list[str], status: int
    ) -> None:
        """Security 4: a request with a token needs no Origin header.

        If it has one, it must be the origin of this server or one on the list.
        """
        path = everybody(tmp_path / "tokens.toml")
        async with running(tokens_file=path, origins=frozenset(listed)) as it, http(it) as client:
            headers = bearer(ADMIN)
            if origin:
                headers["origin"] = it.server.url if origin == "own" else origin
            assert (await client.post(PAUSE, headers=headers)).status_code == status

    async def test_two_origins(self, tmp_path: Path) -> None:
        """A request with two Origin headers is refused."""
        path = everybody(tmp_path / "tokens.toml")
        async with running(tokens_file=path) as it, http(it) as client:
            headers = [("authorization", f"Bearer {ADMIN}"), *[("origin", it.server.url)] * 2]
            problem(await client.get("/v1/queues", headers=headers), 403, "origin")

    async def test_without_authentication(self) -> None:
        """An open server on loopback has no sessions, so a request with a session cookie is served like any other."""
        async with running() as it, http(it) as client:
            headers = {"cookie": shown(session_cookie("old", secure=False))}
            assert (await client.post(PAUSE, headers=headers)).status_code == 200
