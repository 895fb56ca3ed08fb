"""Who is told how jobs ended: it checks the signature of every callback, and refuses some at first."""

from __future__ import annotations

import msgspec
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["Receiver"]

_REFUSES = 10
"""one in so many is refused the first time"""


class _Told(msgspec.Struct, frozen=True):
    job_id: str
    status: str


class Receiver:
    """An application, and what came to it."""

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)
        self.ended: dict[str, str] = {}
        """how each job has ended, by its id, as a callback that was accepted has said"""
        self.refused: set[str] = set()
        """ids of the callbacks that were refused on purpose"""
        self.forged = 0
        self._seen = 0
        self.app = Starlette(routes=[Route("/done", self._receive, methods=["POST"])])

    async def _receive(self, request: Request) -> Response:
        body = await request.body()
        try:
            self._webhook.verify(body, dict(request.headers))
            told = msgspec.json.decode(body, type=_Told)
        except (WebhookVerificationError, msgspec.MsgspecError):
            self.forged += 1
            return Response(status_code=400)
        callback = request.headers["webhook-id"]
        self._seen += 1
        if self._seen % _REFUSES == 1 and callback not in self.refused:
            self.refused.add(callback)
            return Response(status_code=503)
        self.ended[told.job_id] = told.status
        return Response(status_code=204)
