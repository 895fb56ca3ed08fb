"""The store's operations in the small model of the system; each also updates what the laws expect of the tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.model.books import Name
from tests.model.deliveries import Gone, Late
from tests.model.laws import Receipt
from tests.model.players import AGE
from tests.model.spec import Retry

if TYPE_CHECKING:
    from tests.model.small import Small


def receive(token: str, turn: int, limit: int, world: Small) -> Any:
    """Run a consumer's receive. Return its deliveries, None if the consumer is unknown, or [] if the call is stale."""
    before = world.books.clone()
    try:
        told = world.books.receive(token, turn, limit)
    except Gone:
        return None
    except Late:
        return []
    world.fates.promoted(world.books)
    world.fates.delivered(world.books, told, before)
    return told.given


def settle(
    name: Name, receipt: Receipt, attempt: int, verb: str, world: Small, *, known: bool = True
) -> str:
    """Settle a delivery with the given verb and return the store's answer."""
    books, (token, fence) = world.books, receipt
    due = (books.now // AGE + 1) * AGE
    match verb:
        case "ack":
            answer = books.ack(name, fence, token, known=known)
        case "retry":
            answer = books.schedule_retry(name, Retry(due, "", fence, token, attempt))
        case "bury":
            answer = books.dead_letter(name, fence, token)
        case _:
            answer = books.redeliver(name, fence, token, token if verb == "lost" else "")
    world.fates.settled(name, receipt, verb, answer, due, world.plan.max_losses)
    return answer


def maintain(world: Small) -> Any:
    """Run one pass of maintenance: promote due tasks and expire late ones."""
    world.books.promote_due()
    world.fates.promoted(world.books)
    expired = world.books.expire()
    for name, _ in expired:
        world.fates.ended(name, "expired")
    return f"{len(expired)} expired"


def give_up(token: str, most: int, world: Small) -> Any:
    """Take back the deliveries of a silent consumer, as maintenance does."""
    world.books.give_up(token)
    for name, fate in tuple(world.fates.items()):
        if fate.holder and fate.holder.token == token:
            world.fates.handed_back(name, lost=True, most=most)
    return "done"


def leave(token: str, world: Small) -> Any:
    """End a consumer gracefully: its deliveries return without counting as lost."""
    world.books.leave(token)
    for name, fate in tuple(world.fates.items()):
        if fate.holder and fate.holder.token == token:
            world.fates.handed_back(name, lost=False, most=0)
    return "done"
