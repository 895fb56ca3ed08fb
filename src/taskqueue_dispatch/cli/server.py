"""How commands talk to a server with the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_remote.client import Answer, HttpClient
from taskqueue_remote.problems import problem_of, to_error

T = TypeVar("T")
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the server with the dispatcher. TASKQUEUE_SERVER_URL.",
        show_default=False,
    ),
]
_NOT_FOUND = 404
_NO_ROUTE = "not_found"
_STARTS = "taskqueue dispatch"


class NotFound(TaskQueueError):
    """There is no such job, endpoint or model."""

    code = "not_found"


class DispatchServer(HttpClient):
    """A client of one server with the dispatcher."""

    def error(self, answer: Answer) -> TaskQueueError:
        """Return the error that an answer without success stands for."""
        shown = self.address.shown
        problem = problem_of(answer.status, answer.body)
        if answer.status == _NOT_FOUND and problem.code == _NO_ROUTE:
            return ConfigurationError(
                f"the server at {shown} has no dispatcher: start one with '{_STARTS}'"
            )
        if answer.status == _NOT_FOUND and problem.code:
            return NotFound(problem.detail)
        return to_error(problem, shown)


def run_request(url: str | None, work: Callable[[DispatchServer], Awaitable[T]]) -> T:
    """Run what asks a server, to its end."""

    async def run() -> T:
        settings = load_settings(Settings)
        token = settings.token.get_secret_value() if settings.token else None
        server = DispatchServer(
            url or settings.server_url, token, tls_ca=settings.tls_ca, start_command=_STARTS
        )
        try:
            return await work(server)
        finally:
            await server.aclose()

    return asyncio.run(run())
