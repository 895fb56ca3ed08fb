"""Queue names and job ids. A model's name may contain characters that a queue's name must not contain."""

from __future__ import annotations

import hashlib
import re
import secrets

from taskqueue_core.limits import LIMITS, check_label, check_name

JOBS = "dispatch:"
"""prefix of the names of the models' queues"""
CALLBACKS = "dispatch.callbacks"
"""name of the queue of callbacks"""
_PLAIN = re.compile(r"[A-Za-z0-9._:@+<>-]")
_MARK = 10
_DIGEST = 32


def queue_of(model: str) -> str:
    """Return the name of a model's queue.

    Characters that a queue's name cannot have are escaped as ``=XX``. A name that is too long is shortened and ends
    with a digest. Raises `InvalidInput` if ``model`` is not a valid model name.
    """
    check_label("model", model)
    text = "".join(c if _PLAIN.match(c) else _escaped(c) for c in model)
    if len(JOBS) + len(text) <= LIMITS.name:
        return JOBS + text
    retained = LIMITS.name - len(JOBS) - _DIGEST - 1
    return f"{JOBS}{text[:retained]}~{digest(model)[:_DIGEST]}"


def mark_of(model: str) -> str:
    """Return the prefix of the ids of a model's jobs."""
    return digest(model)[:_MARK]


def job_id(model: str, idempotency_key: str | None = None, tenant: str | None = None) -> str:
    """Return a job id: the model's prefix, and random digits.

    With an idempotency key, a digest of the tenant and the key takes the place of the random digits.
    """
    if idempotency_key is None:
        return f"{mark_of(model)}-{secrets.token_hex(16)}"
    check_name("idempotency_key", idempotency_key)
    text = digest(f"{tenant or ''}/{idempotency_key}")
    return f"{mark_of(model)}-{text[:_DIGEST]}"


def _escaped(character: str) -> str:
    return "".join(f"={byte:02X}" for byte in character.encode())


def digest(text: str) -> str:
    """Return the SHA-256 digest of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
