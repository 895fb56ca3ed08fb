"""Parsing the records of the slot pool, which `lua/lib/slots.lua` packs."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Permit, SlotLease
from taskqueue_redis.scripts.runner import seconds

_RECORD_FIELDS = Struct("<4B9d")
_LEASE = Struct("<4B4d32s")
STATES = (Permit.UNASSIGNED, Permit.ASSIGNED, Permit.DETACHED)
_GRANT = 6
"""number of values per lease in the answer of ``slots_acquire``"""


class EndpointRecord(NamedTuple):
    """An endpoint and its leases, without their tokens."""

    number: int
    """position in the order of registration"""
    info: EndpointInfo
    leases: list[SlotLease]


def _token(epoch: str, number: str, fence: str, secret: bytes) -> str:
    return f"{epoch}.{fence}.{number}x{secret.decode()}"


def granted(reply: Sequence[bytes], model: str, holder: str) -> tuple[SlotLease, ...]:
    """Parse the leases in the answer of the script ``slots_acquire``."""
    epoch, expires_at = reply[0].decode(), seconds(reply[1])
    leases = []
    for at in range(2, len(reply), _GRANT):
        number, fence, secret, server, url, switched = reply[at : at + _GRANT]
        leases.append(
            SlotLease(
                model=model, server=server.decode(), url=url.decode(), holder=holder,
                token=_token(epoch, number.decode(), fence.decode(), secret), fence=int(fence),
                state=Permit.UNASSIGNED, expires_at=expires_at, switched=bool(switched),
            )
        )  # fmt: skip
    return tuple(leases)


def lease_of(
    epoch: bytes, place: tuple[str, str, str], reply: Sequence[Any], *, hidden: bool = False
) -> SlotLease:
    """Parse a lease from ``reply``: the endpoint's id, the fence, the packed record and the note.

    ``place`` is the endpoint's model, server and URL. ``hidden`` omits the token, which only the holder may know.
    """
    model, server, url = place
    number, fence, packed, note = reply
    state, switched, resumed, _, expires_at, _, _, _, secret = _LEASE.unpack_from(packed)
    holder, _, job = packed[_LEASE.size :].decode().partition("\0")
    return SlotLease(
        model=model, server=server, url=url, holder=holder,
        token="" if hidden else _token(epoch.decode(), number.decode(), fence.decode(), secret),
        fence=int(fence), state=STATES[state], job=job or None, expires_at=expires_at / 1_000_000,
        switched=bool(switched), resumed=bool(resumed), note=note,
    )  # fmt: skip


def read_record(reply: Sequence[Any], now: float) -> EndpointRecord:
    """Parse an endpoint in the answer of the script ``slots_look`` or ``slots_register``."""
    number, last_model, fields = reply
    matches: dict[bytes, bytes] = dict(zip(fields[::2], fields[1::2], strict=True))
    packed = matches.pop(b"h")
    url = matches.pop(b"u").decode()
    reports, well, draining, removed, slots, priority, together, rests, *_ = (
        _RECORD_FIELDS.unpack_from(packed)
    )
    model, _, server = packed[_RECORD_FIELDS.size :].decode().partition("\0")
    leases = [
        lease_of(b"", (model, server, url), (number, fence, lease, None), hidden=True)
        for fence, lease in matches.items()
    ]
    states = [lease.state for lease in leases]
    info = EndpointInfo(
        endpoint=Endpoint(
            model=model, server=server, url=url, slots=int(slots), priority=int(priority),
            reports=bool(reports), together=int(together) or None,
        ),
        healthy=bool(well or not reports),
        draining=bool(draining),
        removed=bool(removed),
        resting_until=rests / 1_000_000 if rests / 1_000_000 > now else None,
        unassigned=states.count(Permit.UNASSIGNED),
        assigned=states.count(Permit.ASSIGNED),
        detached=states.count(Permit.DETACHED),
        overdue=sum(lease.job is not None and lease.expires_at <= now for lease in leases),
        last_model=last_model.decode() or None,
    )  # fmt: skip
    return EndpointRecord(int(number), info, leases)
