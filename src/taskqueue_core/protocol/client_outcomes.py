"""Encoding of outcomes as frames, with as few frames as the limits allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Raw

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, RetryLater, Success

_ENVELOPE = 256
_PER_RECEIPT = 16


def clean_text(text: str) -> str:
    """Return text that a frame can carry: cut to the limit, lone surrogates replaced."""
    return text[: LIMITS.text].encode("utf-8", "replace").decode()


def frames_of(
    outcomes: Iterable[tuple[str, Outcome]], limits: frames.WireLimits
) -> Iterator[frames.ClientFrame]:
    """Yield frames for outcomes by receipt. Acks and releases are batched; the order of receipts is not kept."""
    batch = max(1, min(limits.batch, LIMITS.batch))
    acks: list[tuple[str, bytes | None]] = []
    released: list[str] = []
    for receipt, outcome in outcomes:
        match outcome:
            case Success(result):
                acks.append((receipt, result))
            case HandBack():
                released.append(receipt)
            case RetryLater(delay, error):
                yield frames.RetryFrame(receipt=receipt, error=clean_text(error), delay=delay)
            case Failed(error):
                yield frames.RetryFrame(receipt=receipt, error=clean_text(error))
            case Rejected(reason, detail):
                yield frames.DeadLetterFrame(
                    receipt=receipt,
                    reason=clean_text(reason),
                    error=None if detail is None else clean_text(detail),
                )
    yield from _acks(acks, batch, min(limits.frame, LIMITS.frame))
    for start in range(0, len(released), batch):
        yield frames.RedeliverFrame(receipts=released[start : start + batch])


def _acks(
    outcomes: list[tuple[str, bytes | None]], batch: int, frame: int
) -> Iterator[frames.AckFrame]:
    receipts: list[str] = []
    results: dict[str, Raw] = {}
    size = _ENVELOPE
    for receipt, result in outcomes:
        cost = len(receipt) + _PER_RECEIPT
        if result is not None:
            cost += len(receipt) + len(result)
        if receipts and (len(receipts) == batch or size + cost > frame):
            yield frames.AckFrame(receipts=receipts, results=results)
            receipts, results, size = [], {}, _ENVELOPE
        receipts.append(receipt)
        if result is not None:
            results[receipt] = Raw(result)
        size += cost
    if receipts:
        yield frames.AckFrame(receipts=receipts, results=results)
