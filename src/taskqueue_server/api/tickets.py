"""Issuing tickets, with which browsers read the events of one task."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from taskqueue_core.limits import check_number
from taskqueue_server.api.rights import READING
from taskqueue_server.auth.tickets import LONGEST
from taskqueue_server.routing.operations import Operation, RequestContext, answer


class TicketIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how long a ticket is valid."""

    seconds: int = 600
    """number of seconds, from 1 to 86,400"""


class TicketOut(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket for the events of one task, and the time at which it expires, in Unix seconds."""

    ticket: str
    expires_at: float


async def ticket(call: RequestContext) -> Response:
    """Return a ticket: text with which anyone may read the events of this task, and nothing else, until it expires.

    A browser passes it as `ticket` in the query of `GET /v1/tasks/{key}/{id}/events`. It stays valid if the token that
    asked for it is revoked. The task need not exist yet.
    """
    wanted = await call.body(TicketIn)
    check_number("seconds", wanted.seconds, 1, LONGEST)
    key, task_id = call.name("key"), call.name("id")
    tickets = call.context.tickets
    issued = tickets.issue(key, task_id, call.context.backend.now() + wanted.seconds)
    return answer(TicketOut(ticket=issued, expires_at=float(issued.partition(".")[0])))


OPERATIONS = (
    Operation(
        "POST",
        "/v1/tasks/{key}/{id}/ticket",
        ticket,
        {200: TicketOut},
        id="tickets_ticket",
        verb=READING,
        tag="tasks",
        body=TicketIn,
        example={"seconds": 600},
    ),
)
