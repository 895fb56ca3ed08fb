"""How commands talk to a server with the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, TypeVar

import typer

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.remote.client import Answer, HttpClient
from taskqueue_core.remote.problems import problem_of, to_error

__all__ = ["NotFound", "Server", "Url", "asked"]

T = TypeVar("T")
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The server with the dispatcher. TASKQUEUE_SERVER_URL.",
        show_default=False,
    ),
]
_NOT_FOUND = 404
_NO_ROUTE = "not_found"
_STARTS = "taskqueue dispatch"


class NotFound(TaskQueueError):
    """There is no such job, endpoint or model."""

    code = "not_found"


class Server:
    """One server with the dispatcher."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def ask(
        self,
        method: str,
        where: str,
        kind: type[T],
        *,
        body: object = None,
        query: Mapping[str, str | int] | None = None,
    ) -> T:
        """Return the decoded answer. Raises what stands for a problem: see `taskqueue_core.remote.problems`."""
        answer = await self.fetch(method, where, body=body, query=query)
        if not answer.ok:
            raise self.error(answer)
        return self.decode(answer.body, kind)

    async def fetch(
        self,
        method: str,
        where: str,
        *,
        body: object = None,
        query: Mapping[str, str | int] | None = None,
    ) -> Answer:
        """Return an answer whatever its status. Raises `BackendUnavailable` where there is none."""
        return await self._client.fetch(method, where, body=body, query=query)

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Decode JSON. Raises `ConfigurationError` where the server speaks otherwise."""
        return self._client.decode(body, kind)

    def error(self, answer: Answer) -> TaskQueueError:
        """Return the error that an answer stands for."""
        shown = self._client.address.shown
        problem = problem_of(answer.status, answer.body)
        if answer.status == _NOT_FOUND and problem.code == _NO_ROUTE:
            return ConfigurationError(
                f"the server at {shown} has no dispatcher: start one with '{_STARTS}'"
            )
        if answer.status == _NOT_FOUND and problem.code:
            return NotFound(problem.detail)
        return to_error(problem, shown)


def asked(url: str | None, work: Callable[[Server], Awaitable[T]]) -> T:
    """Run what asks a server, to its end."""

    async def run() -> T:
        settings = load_settings(Settings)
        token = settings.token.get_secret_value() if settings.token else None
        client = HttpClient(
            url or settings.server_url, token, tls_ca=settings.tls_ca, starts=_STARTS
        )
        try:
            return await work(Server(client))
        finally:
            await client.aclose()

    return asyncio.run(run())
