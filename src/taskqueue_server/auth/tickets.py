"""Tickets: text with which a browser may read the events of one task, without a token.

A ticket is the time at which it expires, in whole Unix seconds, a dot, and an HMAC-SHA256 of that time and the names of
the queue and the task, as base64url without padding. Nothing is stored. Servers that share a key accept each other's
tickets; another key makes all earlier tickets invalid.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import in_bytes
from taskqueue_server.problems import ProblemError

LONGEST = 86_400
"""maximum number of seconds for which a ticket is valid"""
_PURPOSE = "events"
_TICKET = re.compile(r"([0-9]{1,12})\.([A-Za-z0-9_-]{43})")
_KEY_BYTES = (32, 4096)
"""smallest and largest size of a key file, in bytes"""


class Tickets:
    """Issues tickets and checks them, with one key."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the key file. Without one, take a random key, which ends with this process.

        Raises `ConfigurationError` if the file cannot be read, or is too small or too large.
        """
        self._key = secrets.token_bytes(32) if path is None else _read(path)

    def issue(self, key: str, task_id: str, expires: float) -> str:
        """Return a ticket for the events of a task, which is valid until ``expires``, in Unix seconds."""
        at = ceil(expires)
        return f"{at}.{self._sign(key, task_id, at)}"

    def expiry(self, ticket: str, key: str, task_id: str, now: float) -> float:
        """Return the time at which a ticket expires. Raises `ProblemError` unless it permits to read this task now.

        The error does not say what is wrong, and does not contain the ticket.
        """
        found = _TICKET.fullmatch(ticket)
        at = int(found[1]) if found else 0
        expected = self._sign(key, task_id, at)
        genuine = hmac.compare_digest(found[2] if found else "", expected)
        if not genuine or at <= now:
            raise ProblemError(
                401,
                "bad_ticket",
                "the ticket has expired, or is not for this task: get another one",
            )
        return at

    def _sign(self, key: str, task_id: str, at: int) -> str:
        signed = msgspec.json.encode([_PURPOSE, key, task_id, at])
        digest = hmac.digest(self._key, signed, "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@contextmanager
def expiring(seconds: float) -> Iterator[asyncio.Event]:
    """Yield an event that is set after so many seconds, unless the block ends before."""
    ended = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(max(0.0, seconds), ended.set)
    if seconds <= 0:
        ended.set()  # the block must not come before the timer
    try:
        yield ended
    finally:
        timer.cancel()


def _read(path: Path) -> bytes:
    smallest, largest = _KEY_BYTES
    try:
        with path.open("rb") as file:
            key = file.read(largest + 1).strip()
    except OSError as error:
        raise ConfigurationError(
            f"TASKQUEUE_SERVER_TICKET_KEY_FILE: cannot be read ({type(error).__name__}): {path}"
        ) from None
    if not smallest <= len(key) <= largest:
        raise ConfigurationError(
            f"TASKQUEUE_SERVER_TICKET_KEY_FILE: has {in_bytes(len(key))}; expected {smallest} to {largest} random "
            "bytes, for example from 'openssl rand -hex 32'"
        )
    return key
