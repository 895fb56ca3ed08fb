"""The HTTP client of the dispatcher's commands, and the arguments that the commands share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from rich.text import Text

from taskqueue_cli.output import argument, console, option, print_json
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_remote.client import Answer, HttpClient
from taskqueue_remote.problems import problem_of, to_error

T = TypeVar("T")
Model = Annotated[str, argument("Name of the model.", metavar="MODEL")]
Url = Annotated[
    str | None,
    option(
        "URL of the server with the dispatcher. Default: TASKQUEUE_SERVER_URL.",
        "--url",
        metavar="URL",
    ),
]
_NOT_FOUND = 404
_NO_ROUTE = "not_found"
_START_COMMAND = "taskqueue dispatch"


class NotFound(TaskQueueError):
    """The error for a job or an endpoint that was not found."""

    code = "not_found"


class NoSlotsError(TaskQueueError):
    """The error if a job was refused and not stored, for example because its model has no slots."""

    code = "no_slots"


class DispatchServer(HttpClient):
    """The HTTP client for a server with the dispatcher."""

    def error(self, answer: Answer) -> TaskQueueError:
        """Return the error for an unsuccessful response."""
        shown = self.address.shown
        problem = problem_of(answer.status, answer.body)
        if answer.status == _NOT_FOUND and problem.code == _NO_ROUTE:
            return ConfigurationError(
                f"the server at {shown} has no dispatcher: start one with '{_START_COMMAND}'"
            )
        if answer.status == _NOT_FOUND and problem.code:
            return NotFound(problem.detail)
        if problem.code == NoSlotsError.code:
            return NoSlotsError(f"the job was refused: {problem.detail}")
        return to_error(problem, shown)


def run_request(url: str | None, work: Callable[[DispatchServer], Awaitable[T]]) -> T:
    """Connect to a server, call ``work`` with the client, and return the result of ``work``."""

    async def run() -> T:
        settings = load_settings(Settings)
        token = settings.token.get_secret_value() if settings.token else None
        server = DispatchServer(
            url or settings.server_url, token, tls_ca=settings.tls_ca, start_command=_START_COMMAND
        )
        try:
            return await work(server)
        finally:
            await server.aclose()

    return asyncio.run(run())


def report(result: object, text: str, *, as_json: bool) -> None:
    """Print the result of a change: as JSON, or as one line of text."""
    if as_json:
        print_json(result)
    else:
        console.print(Text.assemble(("✔ ", "green"), text))
