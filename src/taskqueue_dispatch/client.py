"""Submission of a job with retries until the server confirms it, even if requests or answers are lost."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
import msgspec

from taskqueue_core.errors import PublishUnconfirmed, TaskQueueError
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import LIMITS, check_name, check_number
from taskqueue_core.retry import RetryPolicy

_BACKOFF = RetryPolicy(base=0.1, cap=10.0, jitter=0.5)
_MAX_RETRY_AFTER = 60.0
"""maximum number of seconds for which a ``Retry-After`` is obeyed; a larger value is reduced to this one"""
_TRY_SECONDS = 30.0
_MAX_ANSWER_BYTES = 64 * 1024
_KEY = "idempotency_key"
_SUCCESS = range(200, 300)
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
"""status codes after which the request is retried; the idempotency key makes the retry safe"""
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class SubmitRefused(TaskQueueError):
    """Raised if the server refused the job with a status after which a retry would not help."""

    code = "submit_refused"

    def __init__(self, status: int, problem: str, idempotency_key: str) -> None:
        super().__init__(f"the job was refused with status {status}: {problem}")
        self.status = status
        self.idempotency_key = idempotency_key


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """The confirmation that the job is stored exactly once."""

    idempotency_key: str
    tries: int
    answer: dict[str, Any]
    """the server's JSON answer"""


class _Submission:
    """The state of one submission: the request body, and the decision after each try. Does no I/O."""

    def __init__(
        self,
        submission: Mapping[str, object],
        attempts: int,
        deadline: float,
        uniform: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        check_number("attempts", attempts, 1, 1_000_000)
        fields = dict(submission)
        key = fields.get(_KEY)
        self.key: str = secrets.token_hex(16) if key is None else str(key)
        check_name(_KEY, self.key if key is None else key)
        self.body = encode_json("submission", fields | {_KEY: self.key})
        self.tries = 0
        self._attempts = attempts
        self._uniform = uniform
        self._clock = clock
        self._deadline = clock() + deadline

    @property
    def timeout(self) -> float:
        """Return the timeout in seconds of the try that is about to start."""
        return max(0.001, min(_TRY_SECONDS, self._deadline - self._clock()))

    def after(self, status: int, headers: Mapping[str, str], body: bytes) -> Confirmed | float:
        """Return the confirmation, or the number of seconds to wait before the next try.

        Raises `SubmitRefused` or `PublishUnconfirmed`.
        """
        if status in _SUCCESS:
            try:
                answer = msgspec.json.decode(body, type=dict[str, Any])
            except _UNREADABLE:
                return self.pause("an unreadable response", None)
            return Confirmed(idempotency_key=self.key, tries=self.tries, answer=answer)
        if status not in _RETRIED:
            raise SubmitRefused(status, _problem(body), self.key)
        return self.pause(f"status {status}", _seconds(headers.get("retry-after")))

    def pause(self, why: str, requested: float | None) -> float:
        """Return the seconds to wait before the next try. Raises `PublishUnconfirmed` if no try or no time is left."""
        pause = _BACKOFF.delay(self.tries, self._uniform)
        # Add jitter to the time that the server requested, so that clients do not all retry at the same time.
        if requested is not None:
            pause = max(pause, min(requested, _MAX_RETRY_AFTER) * (1 + self._uniform() / 2))
        if self.tries >= self._attempts or self._clock() + pause >= self._deadline:
            raise PublishUnconfirmed(
                f"the job was not confirmed (tries: {self.tries}); the last try ended with {why}; "
                f"submit it again with the same {_KEY}",
                task_id=self.key,
            )
        return pause


async def submit_until_confirmed(
    client: httpx2.AsyncClient,
    url: str,
    submission: Mapping[str, object],
    *,
    attempts: int = 50,
    deadline: float = 300.0,
    uniform: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmed:
    """POST a job to ``…/queue/submit`` until it is confirmed; one idempotency key ensures that it is stored once.

    ``submission`` is the JSON object that the server expects; if it has no idempotency key, a random key is used.
    The request is retried after 408, 425, 429, 500, 502, 503, 504, an unreadable response, a broken connection or a
    timeout, for up to ``attempts`` tries and ``deadline`` seconds. Pauses grow exponentially up to about 10 seconds. A
    longer ``Retry-After`` is obeyed for up to 60 seconds, plus jitter.

    Raises `InvalidInput`; `SubmitRefused` for any other unsuccessful answer; and `PublishUnconfirmed` if the tries or
    the time are used up. The ``task_id`` of `PublishUnconfirmed` is the idempotency key with which to try again later.
    """
    attempt = _Submission(submission, attempts, deadline, uniform, clock)
    while True:
        attempt.tries += 1
        try:
            async with (
                asyncio.timeout(attempt.timeout),
                client.stream("POST", url, content=attempt.body, headers=_HEADERS) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES:
                        break
            result = attempt.after(response.status_code, response.headers, bytes(body))
        except httpx2.UnsupportedProtocol:
            raise
        except (httpx2.TransportError, httpx2.DecodingError, TimeoutError) as error:
            result = attempt.pause(type(error).__name__, None)
        if isinstance(result, Confirmed):
            return result
        await sleep(result)


def submit_until_confirmed_sync(
    client: httpx2.Client,
    url: str,
    submission: Mapping[str, object],
    *,
    attempts: int = 50,
    deadline: float = 300.0,
    uniform: Callable[[], float] = random.random,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Confirmed:
    """Submit a job like `submit_until_confirmed`, without an event loop.

    The timeout of a try applies to each read and write separately, so this call may exceed ``deadline``.
    """
    attempt = _Submission(submission, attempts, deadline, uniform, clock)
    while True:
        attempt.tries += 1
        timeout = attempt.timeout
        until = clock() + timeout
        try:
            with client.stream(
                "POST", url, content=attempt.body, headers=_HEADERS, timeout=timeout
            ) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES or clock() > until:
                        break
            result = attempt.after(response.status_code, response.headers, bytes(body))
        except httpx2.UnsupportedProtocol:
            raise
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            result = attempt.pause(type(error).__name__, None)
        if isinstance(result, Confirmed):
            return result
        sleep(result)


def _problem(body: bytes) -> str:
    """Return the text of a problem response (RFC 9457)."""
    try:
        decoded = msgspec.json.decode(body, type=dict[str, Any])
    except _UNREADABLE:
        return "no reason given"
    detail = decoded.get("detail") or decoded.get("title")
    return detail[: LIMITS.text] if isinstance(detail, str) else "no reason given"


def _seconds(header: str | None) -> float | None:
    """Return a ``Retry-After`` header (a number or a date) as seconds from now; ``None`` if missing or invalid."""
    if header is None:
        return None
    try:
        result = float(header)
    except ValueError:
        try:
            result = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, result) if result < float("inf") else None
