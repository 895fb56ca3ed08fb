"""Names: a model may be called anything, a queue may not; and a job's id tells its model."""

from __future__ import annotations

import hashlib
import re
import secrets

from taskqueue_core.limits import LIMITS, check_label, check_name

JOBS = "dispatch:"
"""what the queues of models begin with"""
CALLBACKS = "dispatch.callbacks"
"""the queue of callbacks"""
_PLAIN = re.compile(r"[A-Za-z0-9._:@+<>-]")
_MARK = 10
_DIGEST = 32


def queue_of(model: str) -> str:
    """Return the queue of a model: its name, with what a queue's name can't have as ``=XX``, or cut with a digest.

    Raises `InvalidInput` for what is no model's name.
    """
    check_label("model", model)
    text = "".join(c if _PLAIN.match(c) else _escaped(c) for c in model)
    if len(JOBS) + len(text) <= LIMITS.name:
        return JOBS + text
    retained = LIMITS.name - len(JOBS) - _DIGEST - 1
    return f"{JOBS}{text[:retained]}~{_digest(model)[:_DIGEST]}"


def mark_of(model: str) -> str:
    """Return what the ids of a model's jobs begin with."""
    return _digest(model)[:_MARK]


def job_id(model: str, idempotency_key: str | None = None, tenant: str | None = None) -> str:
    """Return an id for a job: the same one for the same model, tenant and idempotency key, else a fresh one."""
    if idempotency_key is None:
        return f"{mark_of(model)}-{secrets.token_hex(16)}"
    check_name("idempotency_key", idempotency_key)
    text = _digest(f"{tenant or ''}/{idempotency_key}")
    return f"{mark_of(model)}-{text[:_DIGEST]}"


def _escaped(character: str) -> str:
    return "".join(f"={byte:02X}" for byte in character.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
