"""Responses that send server-sent events while a slot is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from taskqueue_server.problems import ProblemError, respond

EVENT_STREAM = "text/event-stream"
_READS = 10.0
"""seconds after which a client that does not read is disconnected, which frees its slot"""


class EventStream(StreamingResponse):
    """A response that holds a slot while it is sent. If no slot is free, a problem is sent instead."""

    def __init__(self, slot: AbstractContextManager[object], events: AsyncGenerator[bytes]) -> None:
        """Create the response, which closes ``events``. ``slot`` raises `ProblemError` if none is free."""
        headers = {"x-accel-buffering": "no", "cache-control": "no-store"}
        super().__init__(events, headers=headers, media_type=EVENT_STREAM)
        self._slot = slot
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while the slot is held."""

        async def patient(message: Message) -> None:
            async with asyncio.timeout(_READS):
                await send(message)

        try:
            with self._slot, suppress(TimeoutError, ClientDisconnect):
                async with aclosing(self._events):
                    await super().__call__(scope, receive, patient)
        except ProblemError as error:
            await respond(error)(scope, receive, send)
