"""Reloading settings while the server runs, and notifications to systemd."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.logs import set_level, set_up_logs
from taskqueue_memory import MemoryBackend
from taskqueue_server.context.server import ServerContext
from taskqueue_server.process import systemd
from taskqueue_server.process.channel import plain, settings_of
from taskqueue_server.process.reload import LIVE, reload, reload_settings
from tests.server.support import running, settings
from tests.server.test_drain import Child, environment
from tests.server.tls import make_files

SECONDS = 60.0


class Manager:
    """A fake systemd: the socket to which a service sends its notifications."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(0)

    async def told(self, *, beats: bool = False) -> dict[str, str]:
        """Return the next message, skipping watchdog messages; with ``beats``, return the next watchdog message."""
        loop = asyncio.get_running_loop()
        while True:
            text = await asyncio.wait_for(loop.sock_recv(self._socket, 4096), SECONDS)
            message = dict(line.split("=", 1) for line in text.decode().splitlines())
            if ("WATCHDOG" in message) == beats:
                return message

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@asynccontextmanager
async def served(
    folder: Path,
    more: Mapping[str, str] | None = None,
    stdin: int | None = None,
    options: Sequence[str] = (),
) -> AsyncIterator[Child]:
    """Run ``taskqueue serve`` in ``folder``; its log is on stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskqueue_cli", "serve", "--port", "0", "--json", *options),
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment() | dict(more or {}),
        cwd=folder,
    )
    assert process.stdout
    try:
        line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
        yield Child(process, line.decode().split('"')[3])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("abstract", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_systemd_is_notified(tmp_path: Path, *, abstract: bool) -> None:
    """The server notifies systemd with READY at its start, RELOADING and READY for a reload, and STOPPING at its end.

    In between it sends WATCHDOG messages.
    """
    if abstract and sys.platform != "linux":
        return  # abstract socket addresses exist on Linux only
    address = f"@taskqueue-{os.getpid()}" if abstract else str(tmp_path / "notify")
    manager = Manager(address)
    file = tmp_path / "taskqueue.toml"
    variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
    try:
        async with served(tmp_path, variables) as it:
            ready = await manager.told()
            assert ready == {"READY": "1", "STATUS": f"at {it.url}"}
            for _ in range(3):
                assert await manager.told(beats=True) == {"WATCHDOG": "1"}
            for text in ("grace = 1\n", "grace = 'no'\n", "not toml"):
                file.write_text(text)
                before = time.monotonic_ns() // 1000
                it.process.send_signal(signal.SIGHUP)
                told = await manager.told()
                assert told["RELOADING"] == "1"
                assert before <= int(told["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
                assert (await manager.told())["READY"] == "1"
            it.process.send_signal(signal.SIGTERM)
            assert await manager.told() == {"STOPPING": "1"}
            assert await it.ended(30) == 0
    finally:
        manager.close()


def test_without_systemd_nothing_is_notified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the notification socket is unset, invalid or absent, the server sends nothing and does not fail."""
    for address in ("", "relative", str(tmp_path / "nobody")):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        systemd.ready()
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    with systemd.watched():  # The watchdog is meant for another process.
        pass


async def test_a_closed_terminal_is_no_reload(tmp_path: Path) -> None:
    """SIGHUP from a closed terminal stops the server; any other SIGHUP reloads the settings."""
    main, terminal = pty.openpty()
    try:
        async with served(tmp_path, stdin=terminal) as it:
            os.close(terminal)
            assert it.process.stderr
            it.process.send_signal(signal.SIGHUP)
            await asyncio.wait_for(it.process.stderr.readuntil(b"settings reloaded"), SECONDS)
            os.close(main)
            main = -1
            it.process.send_signal(signal.SIGHUP)
            assert await it.ended(30) == 0
    finally:
        if main >= 0:
            os.close(main)


async def test_a_renewed_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Security 2: after a reload, new connections get the renewed certificate.

    If the new file is invalid, the last valid certificate stays in use and the problem is logged.
    """
    files = make_files(tmp_path)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files.self_signed.read_bytes())
    trust = ssl.create_default_context(cafile=files.authority)
    async with running(tls_certificate=chain, tls_key=files.key) as it:
        port = int(it.server.url.rsplit(":", 1)[1])

        async def trusted() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            except ssl.SSLCertVerificationError:
                return False
            writer.close()
            await writer.wait_closed()
            return True

        assert not await trusted()
        chain.write_bytes(files.good.read_bytes())
        it.server.adopt(it.context.settings)
        assert await trusted()
        chain.write_text("nothing")
        it.server.adopt(it.context.settings)
        assert await trusted()
        assert "certificate not reloaded, the current one stays in force" in caplog.text


class TestReading:
    """Which settings a reload changes."""

    def test_only_what_can_change_does(self, caplog: pytest.LogCaptureFixture) -> None:
        """A reload applies the settings that can change at run time.

        The names of the others are logged as needing a restart, without values.
        """
        caplog.set_level(logging.INFO, "taskqueue")
        old = settings()
        new = settings(drain=9.0, grace=3.0, origins=frozenset({"https://a"}), host="::1", port=7)
        found = reload_settings(old, lambda: new)
        assert found is not None
        assert found.drain == 9
        assert found.origins == {"https://a"}
        assert (found.host, found.port) == (old.host, old.port)
        late, live = caplog.records
        assert late.__dict__["settings"] == "host port"
        assert set(live.__dict__["settings"].split()) == {"drain", "grace", "origins"}

    def test_bad_settings_change_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        """If the new settings are invalid, the current settings stay in force."""

        def read() -> Settings:
            raise ConfigurationError("invalid settings: TASKQUEUE_DRAIN: no number")

        context = ServerContext(MemoryBackend(), settings())
        before = context.settings
        reload(context, read)
        assert context.settings is before
        assert "TASKQUEUE_DRAIN" in caplog.records[0].__dict__["reason"]

    def test_the_level_of_logs_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reload changes the log level, unless the application has set up logging itself."""
        ours = logging.getLogger("taskqueue")
        monkeypatch.setattr(ours, "handlers", [])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(ours, "level", ours.level)
        before = ours.level
        set_level("debug")
        assert ours.level == before
        set_up_logs()
        set_level("error")
        assert ours.level == logging.ERROR

    def test_what_may_change_is_a_setting(self) -> None:
        """Every setting that a reload can change is an existing setting."""
        assert set(Settings.model_fields) >= LIVE

    def test_settings_reach_another_process_whole(self) -> None:
        """Settings that are passed to another process arrive unchanged, including secrets, paths and sets.

        The environment of the other process does not change them.
        """
        told = settings(
            port=7,
            token=SecretStr("secret"),
            tokens_file=Path("/a"),
            plugins_deny=frozenset({"b", "a"}),
        )
        assert settings_of(plain(told)) == told
        assert settings_of(plain(settings())).drain == settings().drain
