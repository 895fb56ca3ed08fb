"""The middleware around the publishes and runs of declared tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from taskqueue_core.application.call import Call, PublishMiddleware
from taskqueue_core.application.context import Context
from taskqueue_core.tasks import Confirmation


class Middleware(PublishMiddleware):
    """Code around each publish and each run of the tasks of a registry: ``Tasks(middleware=[...])``.

    A subclass overrides one of the methods, or both. They are safe for concurrent use.

    >>> class Timing(Middleware):
    ...     async def run(self, context: Context, handle: Callable[[], Awaitable[Any]]) -> Any:
    ...         began = time.monotonic()
    ...         try:
    ...             return await handle()
    ...         finally:
    ...             histogram.observe(time.monotonic() - began)
    """

    async def publish(
        self, call: Call[Any], send: Callable[[Call[Any]], Awaitable[Confirmation]]
    ) -> Confirmation:
        """Publish a call, or another one, with ``send``, and return the confirmation, also that of a refused call.

        What this raises, the publisher gets. It also runs for blocking publishes, and once for each call of a
        `taskqueue_core.Tasks.publish_many`, whose calls are sent together once all of them await ``send``.
        """
        return await send(call)

    async def run(
        self,
        context: Context,  # noqa: ARG002 - for subclasses
        handle: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Run a task with ``handle``, which opens its dependencies and calls its handler, and return the result.

        What this returns or raises counts as what the handler returned or raised. ``context`` is the one of the task;
        in a batch, of the first one.
        """
        return await handle()
