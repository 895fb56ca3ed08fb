"""JSON logs, and the access log."""

from __future__ import annotations

import ast
import io
import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
from websockets.exceptions import ConnectionClosed, InvalidStatus

from taskqueue_core.consumer import maintenance
from taskqueue_core.logs import FIELDS, formatter, set_up_logs
from taskqueue_core.tasks import Task
from tests.server.access import ADMIN, A, bearer, entry, everybody, write
from tests.server.support import Running, eventually, http, running
from tests.server.test_serve_reload import served

SECRET = "c4nary"
EVIL = "a\r\nb\x1b[2J\u2028\x7f\x00"


class Lines:
    """Logged JSON lines, one object per line."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        """Return the whole log as text."""
        return self.stream.getvalue()

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one event."""
        found = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in found if line["event"] == event]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Collect JSON logs, on a root logger without handlers, as in a program before it sets up logging."""
    root, ours, program = map(logging.getLogger, (None, "taskqueue", "uvicorn"))
    before = [(log, log.handlers[:], log.level, log.propagate) for log in (root, ours, program)]
    root.handlers[:] = ours.handlers[:] = []
    found = Lines()
    set_up_logs(found.stream, logging.DEBUG, "json")
    yield found
    for log, handlers, level, propagate in before:
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate


class TestJson:
    """The JSON format of log lines."""

    def test_a_line(self, lines: Lines) -> None:
        """A line starts with time, level, logger and message, followed only by the allowed fields."""
        log = logging.getLogger("taskqueue.server.test")
        log.info("hello", extra={"status": 200, "token": SECRET, "payload": SECRET})
        (line,) = lines.of("hello")
        assert list(line) == ["timestamp", "level", "logger", "event", "status"]
        assert (line["level"], line["logger"], line["status"]) == (
            "info",
            "taskqueue.server.test",
            200,
        )
        assert SECRET not in lines.text

    @pytest.mark.parametrize("form", ["json", "text", "people"])
    def test_no_value_forges_a_line(self, form: str) -> None:
        """Security 15: in no log format can a value start a new line, control the terminal, or add a field.

        This also holds for text in a traceback.
        """
        shown = formatter(for_people=form == "people", as_json=form == "json")
        with pytest.raises(ValueError, match="invalid literal") as raised:
            int("x")
        failure = (raised.type, raised.value, raised.tb)
        record = logging.LogRecord("taskqueue.x", logging.INFO, "", 0, EVIL, (), failure)
        record.token = SECRET
        for field in FIELDS:
            setattr(record, field, EVIL + '", "level": "critical' + "x" * 5000)
        text, *more = shown.format(record).split("\n")
        # On a terminal, the lines of a traceback are indented, so they are no records of their own.
        assert all(line.startswith("    ") and line.isprintable() for line in more)
        assert bool(more) == (form == "people")
        assert text.isascii()
        assert text.isprintable()
        assert SECRET not in text
        assert "ValueError" in "".join((text, *more))
        assert len(text) < 400 * (len(FIELDS) + 1) + 1000
        if form == "json":
            line = json.loads(text)
            assert (line["level"], line["event"]) == ("info", r"a\r\nb\x1b[2J\u2028\x7f\x00")
            assert "ValueError" in line["exception"]
        else:
            assert "reason=" in text

    async def test_queues_without_a_consumer(
        self, lines: Lines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault K1: queues that have waiting tasks but no consumer are named in one log line of limited length."""
        monkeypatch.setattr(maintenance, "_EVERY", 0.001)
        async with running() as it:
            await it.backend.publisher.publish(*(Task(key=f"queue-{n}") for n in range(50)))
            await eventually(lambda: lines.of("queues with waiting tasks have no consumer"))
            (line,) = lines.of("queues with waiting tasks have no consumer")
        assert line["queues"].startswith("queue-0 queue-1 queue-10 ")
        assert len(line["queues"]) == 200


@asynccontextmanager
async def guarded(path: Path) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """Run a server that requires tokens; yield it with an HTTP client."""
    async with running(tokens_file=path) as it, http(it) as client:
        yield it, client


class TestAccess:
    """The access log of requests and sockets."""

    async def test_requests(self, lines: Lines, tmp_path: Path) -> None:
        """Each request is logged with the path template of its operation, status, duration and identity."""
        async with guarded(everybody(tmp_path / "tokens.toml")) as (_, client):
            await client.get("/v1/tasks/a/some-id?x=1", headers=bearer(A))
            await client.get("/v1/tasks/b/some-id", headers=bearer(A))
            await client.get("/v1/queues")
            await client.get("/nowhere/at/all", headers=bearer(ADMIN))
            await client.get("/health")
            await client.get("/metrics", headers=bearer(ADMIN))
        told = [
            (line["level"], line["method"], line["path"], line["status"], line.get("identity"))
            for line in lines.of("request")
        ]
        task = "/v1/tasks/{key}/{id}"
        assert told[1:] == [
            ("warning", "GET", task, 403, "a"),
            ("warning", "GET", "/v1/queues", 401, None),
            ("info", "(other)", "(other)", 404, None),
            ("debug", "GET", "/health", 200, None),
            ("debug", "GET", "/metrics", 200, "admin"),
        ]
        assert told[0][:3] == ("info", "GET", task)
        for line in lines.of("request"):
            assert line["logger"] == "taskqueue.access"
            assert line["peer"] == "127.0.0.1"
            assert 0 < line["seconds"] < 5
        assert "some-id" not in lines.text

    async def test_sockets(self, lines: Lines, tmp_path: Path) -> None:
        """Fault K1: a refused socket or hello is logged as a warning; a worker that closes normally is not."""
        async with guarded(everybody(tmp_path / "tokens.toml")) as (it, _):
            with pytest.raises(InvalidStatus):
                async with it.socket(additional_headers={"Origin": f"https://{SECRET}.example"}):
                    pass
            with pytest.raises(ConnectionClosed):
                async with it.worker(SECRET, token=SECRET):
                    pass
            async with it.worker("w", "a", token=A) as worker:
                await worker.send("bye")
                await worker.closed()
            await eventually(lambda: not len(it.context.registry))
            refused, closed = lines.of("socket refused"), lines.of("socket closed")
        assert [(line["level"], line["status"]) for line in refused] == [("warning", 403)]
        assert [(line["level"], line["code"]) for line in closed] == [("warning", 4401)]
        assert SECRET not in lines.text

    async def test_canaries(self, lines: Lines, tmp_path: Path) -> None:
        """Security 15, fault K1: text from clients and workers never appears in the log or in metrics."""
        path = write(tmp_path / "tokens.toml", entry(f"tq_{SECRET}", "n"))
        shown = {**bearer(f"tq_{SECRET}"), "traceparent": SECRET, "user-agent": SECRET}
        async with guarded(path) as (it, client):
            asked = [
                ("GET", f"/v1/{SECRET}?token={SECRET}", None),
                ("GET", f"/v1/tasks/k/{SECRET}%0d%0a?a={SECRET}", None),
                (SECRET.upper(), "/v1/tasks", None),
                ("POST", "/v1/tasks", {"key": SECRET, "payload": SECRET, SECRET: 1}),
                ("POST", "/v1/tasks", {"key": "k", "payload": SECRET, "headers": {"h": SECRET}}),
                ("PUT", "/v1/queues/k/settings", {SECRET: SECRET}),
            ]
            for method, url, body in asked:
                await client.request(method, url, json=body, headers=shown)
            for header in ("host", "origin", "authorization", "cookie"):
                await client.get("/v1/queues", headers={**shown, header: f"http://{SECRET}"})
            async with it.worker("w", credit=1, token=f"tq_{SECRET}") as worker:
                (got,) = await worker.deliveries(1)
                await worker.send("progress", receipt=got["receipt"], value=SECRET)
                await worker.send("retry", receipt=got["receipt"], error=SECRET, delay=0)
                await worker.settled(1)
                await worker.send("credit", n=1)
                (got,) = await worker.deliveries(1)
                await worker.send("dead_letter", receipt=got["receipt"], reason=SECRET)
                await worker.settled(1)
                await worker.socket.send('{"type":"ack","receipts":"' + SECRET + '"}')
                await worker.closed()
            metrics = await client.get("/metrics", headers=bearer(f"tq_{SECRET}"))
            assert metrics.status_code == 200
        assert len(lines.of("request")) == len(asked) + 5
        assert SECRET not in lines.text.lower()
        assert SECRET not in metrics.text.lower()
        assert "\x1b" not in lines.text


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        pytest.param(["--log-format", "json"], {}, id="option"),
        pytest.param([], {"TASKQUEUE_LOG_FORMAT": "json"}, id="variable", marks=pytest.mark.long),
    ],
)
async def test_the_command(options: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    """``taskqueue serve`` uses the configured log format from its first line to its last.

    Security 3: a server without authentication listens on loopback and logs a notice about it.
    """
    async with served(tmp_path, variables, options=options) as it:
        assert it.url.startswith("http://127.0.0.1:")
        async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
            await client.get(f"{it.url}/v1/queues")
        it.process.send_signal(signal.SIGTERM)
        _, told = await it.process.communicate()
        assert it.process.returncode == 0
    found = [json.loads(line) for line in told.decode().splitlines()]
    events = [line["event"] for line in found]
    assert {"serving", "request"} <= set(events)
    (notice,) = [event for event in events if "no authentication" in event]
    assert "taskqueue token new" in notice


class TestText:
    """The text format of log lines, for files."""

    def test_a_traceback_is_one_field(self) -> None:
        """U10: in pairs, a traceback is escaped once, so that a reader can undo it; a missing tenant is left out."""
        with pytest.raises(ValueError, match="invalid literal") as caught:
            int("a\tb")
        fault = (ValueError, caught.value, caught.tb)
        record = logging.getLogger("shop").makeRecord(
            "shop", logging.WARNING, __file__, 1, "no", (), fault, extra={"tenant": None}
        )
        line = formatter().format(record)
        assert "\n" not in line
        assert "tenant" not in line
        text = ast.literal_eval(line.partition("exception=")[2])
        assert text.endswith("\nValueError: invalid literal for int() with base 10: 'a\\tb'")

    def test_requests_of_the_client_are_not_logged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """U10: a worker that logs everything leaves out each HTTP request of its own client."""
        root, client = logging.getLogger(), logging.getLogger("httpx2")
        monkeypatch.setattr(root, "handlers", [])
        before, stream = (root.level, client.level), io.StringIO()
        try:
            set_up_logs(stream, everything=True)
            client.info("HTTP Request: GET ...")
            logging.getLogger("shop").info("shown")
            assert "shown" in stream.getvalue()
            assert "HTTP Request" not in stream.getvalue()
        finally:
            root.setLevel(before[0])
            client.setLevel(before[1])
            structlog.reset_defaults()
