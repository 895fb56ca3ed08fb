"""The capability ``audit``: a log of what operators have done, which all servers of a store share."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec
from msgspec.structs import force_setattr as set_field

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, clean_text, kind_of

AUDIT_KEPT = 10_000
"""number of entries that a store keeps at least; older ones may be deleted"""
DETAIL_CHARACTERS = 500
"""maximum number of characters of `AuditEntry.details`; longer text is cut"""
_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,10})?")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action of an operator. The store sets ``id`` and ``at``.

    >>> AuditEntry(actor="ops", action="purge", key="mail", tasks=17).details
    ''
    """

    actor: str
    """name of the token that was used; ``anybody`` on a server without tokens"""
    action: str
    """what was done, such as ``purge`` or ``redrive``"""
    key: str | None = None
    """name of the queue; ``None`` for an action that concerns no single queue"""
    tasks: int | None = None
    """number of tasks that the action has changed; ``None`` if it changes no tasks"""
    details: str = ""
    """further details, such as the settings that were changed, or the filter that selected the tasks"""
    id: str = ""
    at: float = 0.0
    """time of the action by the store's clock, in Unix seconds"""

    def __post_init__(self) -> None:
        """Cut long texts."""
        set_field(self, "actor", clean_text(self.actor)[: LIMITS.name])
        set_field(self, "details", clean_text(self.details)[:DETAIL_CHARACTERS])


class Audit(Protocol):
    """The log of operators' actions. It is bounded: the oldest entries are deleted first."""

    async def record(self, entry: AuditEntry) -> None:
        """Add an entry. The store chooses its ``id`` and ``at``. If the answer is lost, the entry may be missing."""

    async def entries(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        """Return up to ``limit`` entries, newest first, starting after the one with the id ``after``.

        ``limit`` is from 1 to 1000. An entry that is added during a walk through all pages shifts no page.
        """


def check_audit_page(after: str | None, limit: int) -> None:
    """Raise `InvalidInput` unless these are arguments of `Audit.entries`."""
    if after is not None and not _ID.fullmatch(after):
        raise InvalidInput("after", kind_of(after), "the id of an entry")
    if type(limit) is not int or not 1 <= limit <= LIMITS.batch:
        raise InvalidInput("limit", kind_of(limit), f"a whole number from 1 to {LIMITS.batch}")
