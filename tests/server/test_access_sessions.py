"""Sessions of the dashboard: opaque, ended at sign-out on all servers, and no longer valid than their tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from taskqueue_core.capabilities import slots_of
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.hooks import SESSION_DOCUMENTS
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth import sessions as module
from taskqueue_server.auth.sessions import Sessions
from tests.server.access import ADMIN, entry, everybody, guarded, write
from tests.server.support import eventually, http, problem, running

pytestmark = pytest.mark.fast_clock
COOKIE = "taskqueue-session="


async def sign_in(client: httpx2.AsyncClient, token: str = ADMIN, **headers: str) -> str:
    """Sign in, and return the Cookie header that a browser then sends."""
    answer = await client.post("/login", data={"token": token}, headers=headers)
    client.cookies.clear()
    assert answer.status_code == 303, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


async def status(client: httpx2.AsyncClient, cookie: str) -> int:
    """Return the status with which the API answers a request with this cookie."""
    answer = await client.get("/v1/queues", headers={"cookie": cookie})
    client.cookies.clear()
    return answer.status_code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file with three tokens."""
    return everybody(tmp_path / "tokens.toml")


class Counted:
    """A slot pool's documents that count their reads, and that can fail."""

    def __init__(self, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.fails = False
        self._read = slots_of(backend).documents
        monkeypatch.setattr(slots_of(backend), "documents", self)

    async def __call__(self) -> dict[str, bytes]:
        """Read the documents."""
        self.reads += 1
        if self.fails:
            raise BackendUnavailable("down")
        return await self._read()


class TestSignOut:
    """Security 1: the cookie is a random secret, which the server no longer accepts once the user has signed out."""

    async def test_the_cookie_is_not_the_token(self, path: Path) -> None:
        """Issue 22 A8: two sign-ins get different cookies of a fixed length; the store has no token and no secret."""
        async with guarded(path) as it, http(it) as client:
            one, two = await sign_in(client), await sign_in(client)
            assert one != two
            assert len(one) == len(two) == len(COOKIE) + 43
            stored = str(await slots_of(it.context.backend).documents())
            assert stored.count(SESSION_DOCUMENTS) == 2
            for secret in (ADMIN, one.removeprefix(COOKIE), two.removeprefix(COOKIE)):
                assert secret not in stored

    async def test_an_old_cookie_is_refused(self, path: Path) -> None:
        """Issue 22 A8: the cookie is refused after the sign-out; another session of the same token stays open."""
        async with guarded(path) as it, http(it) as client:
            old, other = await sign_in(client), await sign_in(client)
            assert await status(client, old) == 200
            answer = await client.post("/logout", headers={"cookie": old})
            assert "Max-Age=0" in answer.headers["set-cookie"]
            assert await status(client, old) == 401
            assert await status(client, other) == 200

    async def test_signing_in_again(self, path: Path) -> None:
        """A sign-in with the cookie of a session ends that session."""
        async with guarded(path) as it, http(it) as client:
            old = await sign_in(client)
            new = await sign_in(client, cookie=old)
            assert (await status(client, old), await status(client, new)) == (401, 200)

    async def test_on_another_server(self, path: Path) -> None:
        """A session works at once on another server of the same store, and a sign-out reaches that server."""
        backend = MemoryBackend()
        async with (
            running(backend, tokens_file=path) as here,
            running(backend, tokens_file=path) as there,
            http(here) as first,
            http(there) as second,
        ):
            assert await status(second, await sign_in(first)) == 200
            cookie = await sign_in(first)
            assert await status(second, cookie) == 200
            await second.post("/logout", headers={"cookie": cookie})

            async def is_refused() -> bool:
                return await status(first, cookie) == 401

            await eventually(is_refused)

    async def test_an_open_page(self, path: Path) -> None:
        """The event stream of a page ends when the session ends."""
        async with guarded(path) as it, http(it) as client:
            cookie = await sign_in(client)
            headers = {"cookie": cookie, "accept": "text/event-stream"}
            async with client.stream("GET", "/live?view=overview", headers=headers) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                await it.context.access.sessions.end(cookie.removeprefix(COOKIE))
                async with asyncio.timeout(10):
                    rest = [line async for line in lines]
            assert 'data: {"reason":"signed-out"}' in rest


class TestTokens:
    """Security 6: a session has the rights of its token, and ends with it."""

    @pytest.mark.parametrize("change", ["removed", "expired", "no_admin"])
    async def test_a_session_ends_with_its_token(self, path: Path, change: str) -> None:
        """Issue 22 A8: a token that is removed, expires or loses the right admin ends its sessions."""
        rows = {
            "removed": [entry("tq_other")],
            "expired": [entry(ADMIN, expires_at=1)],
            "no_admin": [entry(ADMIN, verbs=["publish", "consume"])],
        }
        async with guarded(path) as it, http(it) as client:
            cookie = await sign_in(client)
            assert await status(client, cookie) == 200
            write(path, *rows[change])
            await it.context.access.reload()
            assert await status(client, cookie) == 401

    async def test_its_own_end(self) -> None:
        """A session ends after a day at the latest, and the next sign-in deletes it from the store."""
        sessions, backend = _sessions()
        secret = await sessions.start(ADMIN)
        assert await sessions.find(secret)
        now = backend.now() + module.SESSION_SECONDS
        backend.now = lambda: now  # type: ignore[method-assign]
        assert await sessions.find(secret) is None
        await sessions.start(ADMIN)
        assert len(await slots_of(backend).documents()) == 1


class TestForged:
    """Security 2: a cookie that no sign-in has issued gives no access."""

    @pytest.mark.parametrize("value", ["", "%%%", "A", "x" * 43, "x" * 9000, "_" * 43, ADMIN])
    async def test_forged_cookies(self, path: Path, value: str) -> None:
        """A forged or malformed cookie, or the token itself, is refused."""
        async with guarded(path) as it, http(it) as client:
            await sign_in(client)
            headers = {"cookie": COOKIE + value}
            problem(await client.get("/v1/queues", headers=headers), 401, "unauthenticated")

    async def test_damaged_documents(self) -> None:
        """Documents that are not sessions, or were changed in the store, give no access and break no sign-in."""
        sessions, backend = _sessions()
        secret = await sessions.start(ADMIN)
        pool = slots_of(backend)
        (name,) = await pool.documents()
        for text in (b"{}", b'{"expires_at":1e12,"token":"gICAgA=="}'):
            await pool.configure(name, text)
            found = await Sessions(backend).find(secret)
            assert found is None or found.token != ADMIN
        assert await sessions.find(await sessions.start(ADMIN))

    async def test_reads_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests with unknown cookies share reads of the store, and write nothing."""
        sessions, backend = _sessions()
        counted = Counted(backend, monkeypatch)
        monkeypatch.setattr(slots_of(backend), "configure", None)
        results = await asyncio.gather(*(sessions.find(f"{n:043}") for n in range(200)))
        assert not any(results)
        await asyncio.gather(*(sessions.end(f"{n:043}") for n in range(200)))
        assert counted.reads == 2


class TestBounds:
    """What a store and a process keep of sessions is bounded, and an outage ends no session."""

    async def test_the_number_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With more sign-ins than `MAX_SESSIONS`, the oldest sessions end, in the store and in the process."""
        monkeypatch.setattr(module, "MAX_SESSIONS", 5)
        sessions, backend = _sessions()
        secrets = [await sessions.start(ADMIN) for _ in range(12)]
        assert len(await slots_of(backend).documents()) == 5
        assert len(sessions._records) == 5
        assert [bool(await sessions.find(secret)) for secret in secrets] == [False] * 7 + [True] * 5

    async def test_an_outage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the store is down, known sessions stay open; unknown ones are neither accepted nor refused."""
        sessions, backend = _sessions()
        secret = await sessions.start(ADMIN)
        counted = Counted(backend, monkeypatch)
        counted.fails = True
        await asyncio.sleep(module._FRESH_SECONDS)
        assert await sessions.find(secret)
        assert counted.reads == 1
        with pytest.raises(BackendUnavailable):
            await sessions.find("x" * 43)

    async def test_health_of_a_store_that_is_down(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The health check answers although the session cannot be read."""
        backend = MemoryBackend()
        async with running(backend, tokens_file=path) as it, http(it) as client:
            Counted(backend, monkeypatch).fails = True
            headers = {"cookie": COOKIE + "x" * 43}
            assert (await client.get("/health", headers=headers)).status_code == 200
            assert (await client.get("/login", headers=headers)).status_code == 200
            assert (await client.get("/v1/queues", headers=headers)).status_code == 503


def _sessions() -> tuple[Sessions, MemoryBackend]:
    backend = MemoryBackend()
    return Sessions(backend), backend
