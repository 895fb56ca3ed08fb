"""Open connections are closed when their token is revoked or expires."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.hooks import Hooks, Identity
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_server.auth import access as module
from taskqueue_server.auth import tokens
from taskqueue_server.auth.access import AccessControl
from tests.clock import LoopClock
from tests.server.access import ADMIN, A, B, Plugin, bearer, entry, everybody, guarded, spoil, write
from tests.server.support import eventually, http, problem, running, settings

pytestmark = pytest.mark.fast_clock
WITHIN = 10.0
"""seconds within which a change of the tokens must take effect"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file with three tokens."""
    return everybody(tmp_path / "tokens.toml")


class TestStaying:
    """Security 6: a token that was valid when a connection was made may become invalid later."""

    @pytest.mark.parametrize("change", ["revoked", "other_keys", "other_verbs", "expired"])
    async def test_revocation_ends_a_socket(
        self, path: Path, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Security 6: the deliveries of a revoked worker return to the queue within ten seconds, whatever the grace.

        Other workers stay connected.
        """
        now = LoopClock().now
        monkeypatch.setattr(module, "time", SimpleNamespace(time=now))
        rows = {
            "revoked": [],
            "other_keys": [entry(A, keys=["x"])],
            "other_verbs": [entry(A, verbs=["publish"], keys=["a"])],
            "expired": [entry(A, keys=["a"], expires_at=now() + 1)],
        }
        async with (
            guarded(path, grace=30, lease=60) as it,
            it.worker("w1", "a", headers=bearer(A), credit=5) as worker,
            it.worker("w2", "b", token=B) as other,
        ):
            await it.publish("t1", "t2", key="a")
            await worker.deliveries(2)
            write(path, *rows[change], entry(B, keys=["b"]))
            assert await worker.closed(WITHIN) == 4001
            assert worker.socket.close_reason == "revoked"
            await it.reaches("a", waiting=2, in_flight=0)
            await other.send("ping", n=7)
            assert (await other.frame("pong"))["n"] == 7

    async def test_the_same_rights_may_stay(self, path: Path) -> None:
        """Security 6: a connection stays open if its token gets more rights or another name."""
        async with guarded(path) as it, it.worker("w1", "a", headers=bearer(A)) as worker:
            write(path, entry(A, "renamed", keys=["a", "c"]))
            assert await it.context.access.reload()
            await worker.send("ping", n=7)
            assert (await worker.frame("pong"))["n"] == 7

    async def test_on_request_at_once(self, path: Path) -> None:
        """Security 6: a reload request checks the connections at once instead of at the next interval."""
        async with guarded(path) as it, it.worker("w1", "a", token=A) as worker:
            write(path, entry(B))
            it.context.access.ask_to_reload()
            assert await worker.closed(1.5) == 4001

    @pytest.mark.parametrize("text", ["[[token]]\nname = 'x'\n", "[[", None])
    async def test_a_bad_file_changes_nothing(
        self, path: Path, text: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A broken token file neither admits nor disconnects a client.

        The log names the problem, and the next valid file applies.
        """
        async with guarded(path) as it, it.worker("w1", "a", headers=bearer(A)) as worker:
            spoil(path, text)
            assert not await it.context.access.reload()
            assert "previous tokens stay in force" in caplog.text
            async with http(it) as client:
                assert (await client.get("/v1/queues", headers=bearer(ADMIN))).status_code == 200
                problem(await client.get("/v1/queues"), 401, "unauthenticated")
                write(path, entry(B, keys=["b"]))
                assert await it.context.access.reload()
                problem(
                    await client.get("/v1/queues", headers=bearer(ADMIN)), 401, "unauthenticated"
                )
            assert await worker.closed() == 4001

    async def test_a_plugin_is_asked_again(self) -> None:
        """Security 6: a connection that a plugin admitted is closed once the plugin rejects its token."""
        plugin = Plugin()
        async with (
            running(plugin.backend(), lease=60) as it,
            it.worker("w1", "a", token="good") as worker,
            it.worker("w2", "a", headers=bearer("good")) as other,
        ):
            await it.publish("t1", key="a")
            plugin.known = False
            assert await worker.closed(WITHIN) == 4001
            assert await other.closed() == 4001
            assert await it.count(State.WAITING, "a") == 1

    async def test_a_body_that_still_comes_is_not_taken(self, path: Path) -> None:
        """Security 6: tasks of a batch that arrive after its token was revoked are not published."""
        async with guarded(path) as it, http(it) as client:

            async def lines() -> AsyncIterator[bytes]:
                yield b'{"key":"a","id":"x1"}\n'
                await eventually(lambda: it.context.access._watches)
                write(path, entry(B))
                assert await it.context.access.reload()
                yield b'{"key":"a","id":"x2"}\n'

            headers = bearer(A) | {"content-type": "application/x-ndjson"}
            answer = await client.post("/v1/tasks/batch", content=lines(), headers=headers)
            problem(answer, 401, "unauthenticated")
            assert await it.count(State.WAITING, "a") == 0
            assert not it.context.access._watches

    async def test_a_file_that_could_not_be_read_is_read_again(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Security 6: a token file that cannot be read is read again, so that a revocation in it takes effect.

        The read error is logged once.
        """
        really, failures = tokens.load, 0

        def load(where: Path) -> bytes:
            nonlocal failures
            failures += 1
            if failures <= 3:
                raise ConfigurationError("too many open files")
            return really(where)

        async with guarded(path, lease=60) as it, it.worker("w1", "a", headers=bearer(A)) as worker:
            monkeypatch.setattr(tokens, "load", load)
            write(path, entry(B))
            assert await worker.closed(4 * WITHIN) == 4001
            assert caplog.text.count("too many open files") == 1
            looked = failures
            await asyncio.sleep(WITHIN)
            assert failures == looked

    @pytest.mark.parametrize("answer", ["yes", True, {"name": "x"}])
    async def test_what_is_no_identity_admits_no_client(self, answer: Any) -> None:
        """Fault K1: if a plugin returns something other than an identity, no client is admitted by it.

        The other plugins are still asked.
        """
        plugin = Plugin(answer)
        async with running(plugin.backend()) as it, http(it) as client:
            for where in ("/v1/queues", "/v1/tasks/a/x"):
                problem(await client.get(where, headers=bearer("good")), 401, "unauthenticated")
            with pytest.raises(InvalidStatus):
                async with it.socket(additional_headers=bearer("good")):
                    pass

    async def test_one_that_cannot_be_checked_does_not_spare_the_others(self) -> None:
        """Security 6: a connection whose token cannot be checked is closed.

        The connections after it in the same round are still checked.
        """
        plugin = Plugin()
        hooks = Hooks()
        hooks.register(plugin)
        access = AccessControl(settings(), hooks, MemoryBackend())

        def fails(_: Identity) -> bool:
            raise ZeroDivisionError

        with contextlib.ExitStack() as stack:
            events = [
                stack.enter_context(access.watch_access("good", "here", may))
                for may in (fails, lambda _: True, fails, lambda _: False)
            ]
            await access.check()
            assert [event.is_set() for event in events] == [True, False, True, True]

    async def test_each_token_is_asked_about_once(self) -> None:
        """A check of many connections queries each distinct token once."""
        plugin = Plugin()
        hooks = Hooks()
        hooks.register(plugin)
        access = AccessControl(settings(), hooks, MemoryBackend())
        stays = [access.watch_access("good", "here", lambda _: True) for _ in range(100)]
        events = [stay.__enter__() for stay in stays]
        await access.check()
        assert plugin.asked == 1
        plugin.known = False
        await access.check()
        assert all(event.is_set() for event in events)
        assert "good" not in repr(vars(access))
        for stay in stays:
            stay.__exit__(None, None, None)
        assert not access._watches

    async def test_a_plugin_that_fails_stops_no_round(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A failed check is logged, and the next check still runs."""
        access = AccessControl(settings(tokens_file=path), Hooks(), MemoryBackend())
        rounds = 0

        async def check() -> None:
            nonlocal rounds
            rounds += 1
            raise ZeroDivisionError

        monkeypatch.setattr(access, "check", check)
        watching = asyncio.create_task(access.watch())
        await eventually(lambda: rounds > 2, 3 * WITHIN)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
