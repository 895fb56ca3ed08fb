"""What probes and Prometheus read about the processes of ``taskqueue worker``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from taskqueue_cli.worker_board import ALIVE_SECONDS, Board
from taskqueue_core.errors import ConfigurationError

_CONNECTIONS = 100
"""maximum number of open connections; further ones get the status 503"""


class _Metrics(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes together."""
        reports, ended = self._board.total()
        tasks = CounterMetricFamily(
            "taskqueue_worker_tasks", "Attempts that have ended.", labels=("queue", "outcome")
        )
        for labels, number in sorted(ended.items()):
            tasks.add_metric(labels, number)
        yield tasks
        gauges = {
            "running_tasks": ("Running tasks.", sum(report.running for report in reports)),
            "concurrency": (
                "Maximum number of running tasks.",
                sum(report.concurrency for report in reports),
            ),
            "ready_processes": (
                "Processes that receive tasks.",
                sum(report.ready for report in reports),
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"taskqueue_worker_{name}", text, value)


class HealthServer:
    """An HTTP server with ``/alive``, ``/ready`` and ``/metrics``.

    It has a thread of its own, so that it answers while the event loop of the worker is blocked.
    """

    def __init__(self, address: str, board: Board) -> None:
        """Listen on ``address``, such as 127.0.0.1:8421. Raises `ConfigurationError` if that is not possible."""
        self._board = board
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(board))
        self._listener = _listen(address)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="taskqueue-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._server.should_exit = True
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            asyncio.run(self._server.serve([self._listener]))

    async def _answer(self, scope: Any, _receive: Any, send: Any) -> None:
        status, kind, body = 404, "text/plain; charset=utf-8", b"not found\n"
        match scope["path"]:
            case _ if scope["method"] not in {"GET", "HEAD"}:
                status, body = 405, b"use GET\n"
            case "/alive" if self._board.alive():
                status, body = 200, b"alive\n"
            case "/alive":
                status, body = (
                    503,
                    f"an event loop has not turned for {ALIVE_SECONDS:g} s\n".encode(),
                )
            case "/ready" if self._board.ready():
                status, body = 200, b"ready\n"
            case "/ready":
                status, body = 503, b"not connected, or stopping\n"
            case "/metrics":
                status, kind, body = 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _listen(address: str) -> socket.socket:
    host, port = None, None
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{address}")
        if parts.netloc == address:
            host, port = parts.hostname, parts.port
    if not host or port is None:
        raise ConfigurationError(
            f"--health: expected HOST:PORT, such as 127.0.0.1:8421, got {address[:100]!r}"
        )
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigurationError(
            f"--health: cannot listen on {address}: {error.strerror}; choose another address"
        ) from None
