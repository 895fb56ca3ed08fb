"""Normalizes the answers of Redis scripts, so that they can be compared with those of the specification."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.model.books import LEDGER
from tests.model.kin import shown

_RECORD = struct.Struct(">BBBHHHH7s7s7s8sBB7s")
STATES = (
    "waiting",
    "scheduled",
    "done",
    "dead",
    "expired",
    "cancelled",
    "discarded",
    "replaced",
    "blocked",
)
IN_FLIGHT = 10
"""number of the state of a task in flight"""
_PLACES = ("", "fresh", "again", "parked")
_VERBS = ("", "ack", "redeliver", "lost", "bury", "retry")
COUNTED = (*LEDGER, "delivered", "redelivered", "retried", "lost")


def error_of(answer: Any) -> tuple[str, Any]:
    """Split a script's answer into an error message and a value; one of the two is always empty."""
    if isinstance(answer, list) and answer[:1] == [b"!"]:
        return answer[1].decode(), None
    return "", answer


def plain(value: Any) -> Any:
    """Convert numbers and bytes to text recursively, because Redis does not distinguish numbers from text."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value)


def normal(name: str, answer: Any) -> Any:
    """Return a script's answer without parts that do not concern tasks, and with unordered parts sorted."""
    form = _FORMS.get(name)
    return form(answer) if form and isinstance(answer, list) else answer


def walked(answer: Any) -> list[bytes]:
    """Return the keys in an order in which Redis may have visited them: keys without deliveries, then the others."""
    _, _, _, expired, groups, left, others, closed = answer
    gave = [group[0] for group in groups]
    idle = [told[0] for told in (*closed, *expired) if told[0] not in gave]
    return [*idle, *gave, *left, *others]


def _received(answer: list[Any]) -> list[Any]:
    now, due, again, expired, groups, left, others, closed = answer
    given = [entry for group in groups for entry in _given(*group)]
    return [now, due, again, sorted(expired), given, *map(sorted, (left, others, closed))]


def _given(key: bytes, lane: bytes, told: list[Any], _: bytes, inputs: list[Any]) -> list[Any]:
    of_entry = dict(inputs)
    return [
        [key, lane, *entry[:2], shown(entry[2]), *entry[3:], of_entry.get(n, [])]
        for n, entry in enumerate(_entries(told), 1)
    ]


def _maintained(answer: list[Any]) -> list[Any]:
    promoted, expired, forgotten, recovered, anomalies, dead, unclaimed, *rest = answer
    if isinstance(unclaimed, list):
        unclaimed.sort()
    return [
        promoted,
        sorted(expired),
        forgotten,
        recovered,
        anomalies,
        sorted(dead),
        unclaimed,
        *rest,
    ]


def _stats(found: list[Any]) -> list[Any]:
    pairs = dict(zip(found[0][::2], found[0][1::2], strict=True))
    counted = [pairs.get(name.encode(), 0) for name in (*COUNTED, "blocked_on_dead")]
    return [counted, *found[1:]]


def _entries(told: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (told[n : n + 4] for n in range(0, len(told), 4))


def _record(packed: bytes, in_flight: int) -> list[Any]:
    state, place, priority, attempt, losses, prior, handed, *rest = _RECORD.unpack_from(packed)
    seq, fence, at, digest, verb, told, settled = rest
    return [
        STATES[state - 1], _PLACES[place], priority, attempt, losses, prior, handed, *map(_number, (seq, fence, at)),
        digest.hex(), _VERBS[verb], told, _number(settled), in_flight,
    ]  # fmt: skip


def _blocked(told: list[Any] | None) -> list[Any]:
    return [sorted(told[0]), len(told[1]), told[2]] if told else []


def _task(told: list[Any], body: bytes | None, seq: bytes, *rest: Any) -> list[Any]:
    published, tags, worker, _, tenant = rest
    status = [*_record(*told[:2]), _blocked(told[5])]
    return [status, body and shown(body), seq, published, tags, worker, tenant]


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


_FORMS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "receive": _received,
    "adopt": lambda answer: [
        [told[0], shown(told[1]), told[2], told[5]] if told else [] for told in answer
    ],
    "after_lines": lambda answer: [[*told[:9], told[9][1:]] for told in answer],
    "maintain": _maintained,
    "stats": lambda answer: list(map(_stats, answer)),
    "status": lambda answer: [
        [*_record(*told[:2]), _blocked(told[5])] if told else [] for told in answer
    ],
    "task": lambda answer: _task(*answer) if answer else [],
    "list": lambda answer: [[[*told[:10], told[12]] for told in answer[0]], *answer[1:]],
    "dead_letters": lambda answer: [[[told[0], shown(told[3])] for told in answer[0]], answer[1]],
}
