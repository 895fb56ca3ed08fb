"""What every slot pool checks of what it is given, so that all of them refuse the same. Using it is optional."""

from __future__ import annotations

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

__all__ = [
    "Token",
    "check_acquire",
    "check_document",
    "check_endpoint",
    "check_job",
    "check_leases",
    "check_note",
    "check_pairs",
    "check_remade",
    "check_seen",
    "check_ttl",
    "checked_models",
]

_MOST_ACTIVE = 1_000_000
_TOKEN = 200


class Token(NamedTuple):
    """The parts of a lease's token, ``epoch.fence.random``."""

    epoch: str
    fence: int
    random: str

    @classmethod
    def read(cls, text: object) -> Token | None:
        """Return the parts; ``None`` for what is no token, which is as good as a stale one."""
        if not isinstance(text, str) or len(text) > _TOKEN:
            return None
        epoch, _, rest = text.partition(".")
        fence, _, random = rest.partition(".")
        if not (epoch.isalnum() and fence.isdecimal() and random.isalnum() and text.isascii()):
            return None
        return cls(epoch, int(fence), random)

    def __str__(self) -> str:
        """Return the token."""
        return f"{self.epoch}.{self.fence}.{self.random}"


def check_endpoint(model: object, server: object) -> None:
    """Check the names of an endpoint."""
    check_label("model", model)
    check_label("server", server)


def check_ttl(ttl: object) -> None:
    """Check for how long a lease is to be held: more than 0 seconds."""
    check_duration("ttl", ttl)
    if not ttl:
        raise InvalidInput("ttl", "0", "more than 0 seconds")


def check_leases(leases: Sequence[object]) -> None:
    """Check a batch of leases."""
    if len(leases) > LIMITS.batch:
        raise InvalidInput("leases", f"{len(leases)} leases", f"at most {LIMITS.batch}")
    for lease in leases:
        if not isinstance(lease, SlotLease):
            raise InvalidInput("leases", kind_of(lease), "leases of slots")


def check_acquire(
    model: object,
    holder: object,
    limit: object,
    releasing: Sequence[object],
    idle: object,
) -> None:
    """Check what `SlotPool.acquire` is given, but for its ``ttl``."""
    check_label("model", model)
    check_name("holder", holder)
    check_number("limit", limit, 0, LIMITS.batch)
    check_leases(releasing)
    if idle is not None:
        check_duration("idle", idle)


def check_pairs(pairs: Sequence[tuple[SlotLease, str]]) -> None:
    """Check leases with the jobs that they are to be bound to."""
    check_leases([lease for lease, _ in pairs])
    for _, job in pairs:
        check_name("job", job)


def check_remade(lease: SlotLease) -> bool:
    """Whether a lease that the pool does not know may be made again. Raises `InvalidInput` where it is malformed."""
    if lease.job is None or lease.state not in (Permit.ASSIGNED, Permit.DETACHED):
        return False
    check_endpoint(lease.model, lease.server)
    check_name("holder", lease.holder)
    check_name("job", lease.job)
    return True


def check_job(model: object, job: object) -> None:
    """Check a job of a model."""
    check_label("model", model)
    check_name("job", job)


def check_note(note: object) -> None:
    """Check a note: JSON text, as large as a result may be."""
    check_json("note", note, LIMITS.result)


def check_document(document: object) -> None:
    """Check a model's document."""
    if document is not None:
        check_json("document", document, LIMITS.document)


def check_seen(observed: Seen | None, settled: object) -> None:
    """Check an observation."""
    check_duration("settled", settled)
    if observed is None:
        return
    check_number("active", observed.active, 0, _MOST_ACTIVE)
    jobs: object = observed.jobs
    if jobs is None:
        return
    if not isinstance(jobs, frozenset | set) or len(jobs) > LIMITS.slots:
        raise InvalidInput("jobs", kind_of(jobs), f"a set of at most {LIMITS.slots} texts")
    for job in jobs:
        if not isinstance(job, str):
            raise InvalidInput("jobs", f"one of {kind_of(job)}", "texts")


def checked_models(models: Sequence[object]) -> tuple[str, ...]:
    """Return the models of a signal without repeats, or raise `InvalidInput`."""
    unique = dict.fromkeys(str(model) for model in models)
    if not 0 < len(unique) <= LIMITS.keys:
        raise InvalidInput("models", f"{len(unique)} models", f"1 to {LIMITS.keys}")
    for model in models:
        check_label("models", model)
    return tuple(unique)
