"""Optional checks of a `SlotPool`'s arguments, so that all backends raise `InvalidInput` for the same values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from taskqueue_core.capabilities.slots import Permit, Seen, SlotLease
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import (
    LIMITS,
    check_duration,
    check_json,
    check_label,
    check_name,
    check_number,
    kind_of,
)

_MOST_ACTIVE = 1_000_000
_TOKEN_LENGTH = 200
_TOKEN = re.compile(r"([A-Za-z0-9]+)[.]([0-9]+)[.]([A-Za-z0-9]+)")


class Token(NamedTuple):
    """The parts of a lease's token, ``epoch.fence.random``."""

    epoch: str
    fence: int
    random: str

    @classmethod
    def read(cls, text: object) -> Token | None:
        """Return the parts of a token; ``None`` if the text is not a token, which callers treat like a stale token."""
        if not isinstance(text, str) or len(text) > _TOKEN_LENGTH:
            return None
        match = _TOKEN.fullmatch(text)
        return cls(match[1], int(match[2]), match[3]) if match else None

    def __str__(self) -> str:
        return f"{self.epoch}.{self.fence}.{self.random}"


def check_endpoint(model: object, server: object) -> None:
    """Check the names of an endpoint's model and server."""
    check_label("model", model)
    check_label("server", server)


def check_ttl(ttl: object) -> None:
    """Check that the duration of a lease is more than 0 seconds."""
    check_duration("ttl", ttl)
    if not ttl:
        raise InvalidInput("ttl", "0", "more than 0 seconds")


def check_leases(leases: Sequence[object]) -> None:
    """Check the number and the types of the leases in a call."""
    if len(leases) > LIMITS.batch:
        raise InvalidInput("leases", f"{len(leases)} leases", f"at most {LIMITS.batch}")
    for lease in leases:
        if not isinstance(lease, SlotLease):
            raise InvalidInput("leases", kind_of(lease), "SlotLease objects")


def check_acquire(
    model: object,
    holder: object,
    limit: object,
    releasing: Sequence[object],
    idle: object,
) -> None:
    """Check the arguments of `SlotPool.acquire`, except ``ttl``."""
    check_label("model", model)
    check_name("holder", holder)
    check_number("limit", limit, 0, LIMITS.batch)
    check_leases(releasing)
    if idle is not None:
        check_duration("idle", idle)


def check_pairs(pairs: Sequence[tuple[SlotLease, str]]) -> None:
    """Check the arguments of `SlotPool.assign`: pairs of a lease and a job."""
    check_leases([lease for lease, _ in pairs])
    for _, job in pairs:
        check_name("job", job)


def check_remade(lease: SlotLease) -> bool:
    """Return whether a lease that the pool has lost may be created again; it must be bound to a job."""
    if lease.job is None or lease.state not in (Permit.ASSIGNED, Permit.DETACHED):
        return False
    check_endpoint(lease.model, lease.server)
    check_name("holder", lease.holder)
    check_name("job", lease.job)
    return True


def check_job(model: object, job: object) -> None:
    """Check the names of a model and a job."""
    check_label("model", model)
    check_name("job", job)


def check_note(note: object) -> None:
    """Check that a note for the holder of a lease is JSON text within the size limit of task results."""
    check_json("note", note, "result")


def check_document(document: object) -> None:
    """Check that the document of a model is JSON text or ``None``."""
    if document is not None:
        check_json("document", document, "document")


def check_seen(observed: Seen | None, settled: object) -> None:
    """Check the arguments of `SlotPool.reconcile`: a server's report, and a duration in seconds."""
    check_duration("settled", settled)
    if observed is None:
        return
    check_number("active", observed.active, 0, _MOST_ACTIVE)
    jobs: object = observed.jobs
    if jobs is None:
        return
    if not isinstance(jobs, frozenset | set) or len(jobs) > LIMITS.slots:
        raise InvalidInput("jobs", kind_of(jobs), f"a set of at most {LIMITS.slots} strings")
    for job in jobs:
        if not isinstance(job, str):
            raise InvalidInput("jobs", f"an item of type {kind_of(job)}", "only strings")


def checked_models(models: Sequence[object]) -> tuple[str, ...]:
    """Return a signal's model names without duplicates, or raise `InvalidInput`."""
    unique = dict.fromkeys(str(model) for model in models)
    if not 0 < len(unique) <= LIMITS.keys:
        raise InvalidInput("models", f"{len(unique)} models", f"1 to {LIMITS.keys} models")
    for model in models:
        check_label("models", model)
    return tuple(unique)
