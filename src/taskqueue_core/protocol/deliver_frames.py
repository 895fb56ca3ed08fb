"""The frames with which a server sends deliveries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_core.tasks import Delivery

_HEAD, _TAIL = b'{"type":"deliver","deliveries":[', b"]}"
_EMPTY = len(_HEAD + _TAIL)
_encoder = msgspec.json.Encoder()


def deliver_frames(
    deliveries: Sequence[Delivery], size: int
) -> Iterator[tuple[str, Sequence[Delivery]]]:
    """Yield frames, each with its deliveries. ``size``: the number of bytes of all of them."""
    if size < LIMITS.frame:
        whole = _encoder.encode(
            frames.Deliver(deliveries=[frames.to_wire(delivery) for delivery in deliveries])
        )
        if len(whole) <= LIMITS.frame:
            yield whole.decode(), deliveries
            return
    texts: list[bytes] = []
    start, size = 0, _EMPTY
    for index, delivery in enumerate(deliveries):
        text = _encoder.encode(frames.to_wire(delivery))
        if texts and size + len(text) > LIMITS.frame:
            yield _joined(texts), deliveries[start:index]
            texts, start, size = [], index, _EMPTY
        texts.append(text)
        size += len(text) + 1
    yield _joined(texts), deliveries[start:]


def _joined(texts: list[bytes]) -> str:
    return (_HEAD + b",".join(texts) + _TAIL).decode()
