"""Outcomes as frames that a worker sends, and back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import msgspec

from taskqueue_core.limits import LIMITS, clean_text, clean_traceback
from taskqueue_core.protocol import frames
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, RetryLater, Snoozed, Success

_ENVELOPE = 256
"""bytes that are reserved in an ack frame for everything except receipts and results"""
_PER_RECEIPT = 16
"""bytes that are reserved in an ack frame for the JSON punctuation around each receipt and its result"""


def outcomes_of(frame: frames.SettlementFrame) -> Mapping[str, Outcome]:
    """Return the outcome of each receipt that a worker's frame settles. Raises `ProtocolViolation` for a bad result."""
    match frame:
        case frames.AckFrame(receipts=receipts, results=results):
            return {
                receipt: Success(frames.result_text(results[receipt]))
                if receipt in results
                else Success()
                for receipt in receipts
            }
        case frames.RetryFrame(receipt=receipt, delay=delay):
            if frame.free:
                return {receipt: Snoozed(delay or 0)}
            if delay is None:
                return {receipt: Failed(frame.error, frame.traceback)}
            return {receipt: RetryLater(delay, frame.error, frame.traceback)}
        case frames.RedeliverFrame(receipts=receipts):
            return dict.fromkeys(receipts, HandBack())
        case frames.DeadLetterFrame(receipt=receipt):
            return {receipt: Rejected(frame.reason, frame.error, frame.traceback)}


def frames_of(
    outcomes: Iterable[tuple[str, Outcome]],
    limits: frames.WireLimits,
    features: Container[frames.Feature] = frames.FEATURES,
) -> Iterator[frames.ClientFrame]:
    """Yield frames that report outcomes of receipts. Acks and releases are batched, so the order may change.

    For a server without the feature ``snooze``, a snooze is a retry with this delay, which counts an attempt.
    Tracebacks are sent to a server with the feature ``tracebacks``.
    """
    batch = max(1, min(limits.batch, LIMITS.batch))
    acks: list[tuple[str, bytes | None]] = []
    released: list[str] = []
    for receipt, outcome in outcomes:
        if (
            type(outcome) is Success
        ):  # asked first, and faster than a pattern, because most tasks succeed
            acks.append((receipt, outcome.result))
            continue
        match outcome:
            case RetryLater(delay, error):
                yield frames.RetryFrame(
                    receipt=receipt,
                    error=clean_text(error),
                    delay=delay,
                    traceback=_traceback(outcome, features),
                )
            case Snoozed(delay) if frames.Feature.SNOOZE in features:
                yield frames.RetryFrame(receipt=receipt, delay=delay, free=True)
            case Snoozed(delay):
                yield frames.RetryFrame(receipt=receipt, error="snoozed", delay=delay)
            case Failed(error):
                yield frames.RetryFrame(
                    receipt=receipt,
                    error=clean_text(error),
                    traceback=_traceback(outcome, features),
                )
            case HandBack():
                released.append(receipt)
            case Rejected(reason, detail):
                yield frames.DeadLetterFrame(
                    receipt=receipt,
                    reason=clean_text(reason),
                    error=None if detail is None else clean_text(detail),
                    traceback=_traceback(outcome, features),
                )
    yield from _ack_frames(acks, batch, min(limits.frame, LIMITS.frame))
    for start in range(0, len(released), batch):
        yield frames.RedeliverFrame(receipts=released[start : start + batch])


def _traceback(
    outcome: Failed | RetryLater | Rejected, features: Container[frames.Feature]
) -> str | None:
    if outcome.traceback is None or frames.Feature.TRACEBACKS not in features:
        return None
    return clean_traceback(outcome.traceback)


def _ack_frames(
    outcomes: list[tuple[str, bytes | None]], batch: int, frame: int
) -> Iterator[frames.AckFrame]:
    receipts: list[str] = []
    results: dict[str, msgspec.Raw] = {}
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
            results[receipt] = msgspec.Raw(result)
        size += cost
    if receipts:
        yield frames.AckFrame(receipts=receipts, results=results)
