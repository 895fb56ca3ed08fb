"""Reads the final state of the store for the checker: tasks, ledgers and dead letters."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Ledger
from tests.chaos.history import Event, What
from tests.chaos.story import Dump, Known


async def ledgers_of(backend: Backend, keys: Iterable[str]) -> dict[str, Ledger]:
    """Return the ledger of each queue."""
    control = control_of(backend)
    return {key: await control.ledger(key) for key in keys}


def live(ledgers: dict[str, Ledger]) -> int:
    """Return the number of tasks that have not ended yet, over all ledgers."""
    return sum(
        one.blocked + one.waiting + one.scheduled + one.in_flight for one in ledgers.values()
    )


async def dead_ids(backend: Backend, key: str) -> tuple[str, ...]:
    """Return the ids of all dead letters of a queue."""
    letters = dead_letters_of(backend)
    ids: list[str] = []
    while page := await letters.list(key, limit=500, after=ids[-1] if ids else None):
        ids += [letter.task.id for letter in page]
    return tuple(ids)


async def take_dump(backend: Backend, keys: Iterable[str], events: Iterable[Event]) -> Dump:
    """Read the state of every task that any process tried to publish, the ledgers, and the dead letters."""
    keys = tuple(keys)
    asked: dict[str, dict[str, None]] = {key: {} for key in keys}
    for event in events:
        if event.what is What.PUBLISH:
            asked.setdefault(event.key, {})[event.task] = None
    control = control_of(backend)
    tasks: dict[str, dict[str, Known | None]] = {}
    for key, ids in asked.items():
        known = tasks[key] = {}
        names = list(ids)
        for start in range(0, len(names), LIMITS.batch):
            chosen = names[start : start + LIMITS.batch]
            for name, told in zip(chosen, await control.statuses(key, *chosen), strict=True):
                known[name] = Known(told.state.value, told.attempt, told.losses) if told else None
    ledgers = await ledgers_of(backend, keys)
    return Dump(
        tasks=tasks,
        ledgers={key: msgspec.structs.asdict(ledger) for key, ledger in ledgers.items()},
        dead_letters={key: await dead_ids(backend, key) for key in keys},
    )
