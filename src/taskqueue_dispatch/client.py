"""For clients: submit a job until its server has confirmed it, whatever happens to requests and answers on the way."""

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
from taskqueue_core.limits import LIMITS, check_name, check_number
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import encode_json

_PAUSE = RetryPolicy(base=0.1, cap=10.0, jitter=0.5)
_LONGEST = 60.0
"""seconds that a server may have a client wait until the next try"""
_TRY_SECONDS = 30.0
_ANSWER = 64 * 1024
_KEY = "idempotency_key"
_SUCCESS = range(200, 300)
_RETRY_SECONDS = {408, 425, 429, 500, 502, 503, 504}
"""what proxies and servers answer that will do it later, or do not know whether they did; the key makes it harmless"""
_NOT_READ = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class SubmitRefused(TaskQueueError):
    """The server will not take the job, however often it is submitted."""

    code = "submit_refused"

    def __init__(self, status: int, problem: str, idempotency_key: str) -> None:
        super().__init__(f"the job was refused with status {status}: {problem}")
        self.status = status
        self.idempotency_key = idempotency_key


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """The job is stored, once."""

    idempotency_key: str
    tries: int
    answer: dict[str, Any]
    """what the server said"""


class _Course:
    """What to send, and what to do after each try: it does no input or output."""

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
        self._end = clock() + deadline

    @property
    def patience(self) -> float:
        """Seconds for one try."""
        return max(0.001, min(_TRY_SECONDS, self._end - self._clock()))

    def after(self, status: int, headers: Mapping[str, str], body: bytes) -> Confirmed | float:
        """Return the end of it, or the seconds until the next try. Raises `SubmitRefused`, `PublishUnconfirmed`."""
        if status in _SUCCESS:
            try:
                answer = msgspec.json.decode(body, type=dict[str, Any])
            except _NOT_READ:
                return self.pause("an incomplete response", None)
            return Confirmed(idempotency_key=self.key, tries=self.tries, answer=answer)
        if status not in _RETRY_SECONDS:
            raise SubmitRefused(status, _problem(body), self.key)
        return self.pause(f"status {status}", _seconds(headers.get("retry-after")))

    def pause(self, why: str, requested: float | None) -> float:
        """Return the seconds until the next try. Raises `PublishUnconfirmed` where there is none."""
        pause = _PAUSE.delay(self.tries, self._uniform)
        if requested is not None:  # together all would come again at the same time
            pause = max(pause, min(requested, _LONGEST) * (1 + self._uniform() / 2))
        if self.tries >= self._attempts or self._clock() + pause >= self._end:
            raise PublishUnconfirmed(
                f"the job was not confirmed in {self.tries} tries, the last one ended with {why}: "
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
    """POST a job to ``…/queue/submit`` until it is confirmed: with one idempotency key, so it is stored once.

    ``submission`` is the JSON object that the server expects; the key is made where it has none. Answers of 408, 425,
    429, 500, 502, 503 and 504, cut connections and silence are followed by another try, later each time and not before
    ``Retry-After``, for up to ``attempts`` tries and ``deadline`` seconds.

    Raises `SubmitRefused` for any other answer without success, `InvalidInput`, and `PublishUnconfirmed` where tries or
    time are used up: its ``task_id`` is the key, to go on with later.
    """
    course = _Course(submission, attempts, deadline, uniform, clock)
    while True:
        course.tries += 1
        try:
            async with (
                asyncio.timeout(course.patience),
                client.stream("POST", url, content=course.body, headers=_HEADERS) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _ANSWER:
                        break
            result = course.after(response.status_code, response.headers, bytes(body))
        except httpx2.UnsupportedProtocol:
            raise
        except (httpx2.TransportError, httpx2.DecodingError, TimeoutError) as error:
            result = course.pause(type(error).__name__, None)
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
    """Do what `submit_until_confirmed` does, without an event loop: to read one part of an answer has its own time."""
    course = _Course(submission, attempts, deadline, uniform, clock)
    while True:
        course.tries += 1
        patience = course.patience
        until = clock() + patience
        try:
            with client.stream(
                "POST", url, content=course.body, headers=_HEADERS, timeout=patience
            ) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _ANSWER or clock() > until:
                        break
            result = course.after(response.status_code, response.headers, bytes(body))
        except httpx2.UnsupportedProtocol:
            raise
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            result = course.pause(type(error).__name__, None)
        if isinstance(result, Confirmed):
            return result
        sleep(result)


def _problem(body: bytes) -> str:
    """Return what a problem (RFC 9457) says."""
    try:
        decoded = msgspec.json.decode(body, type=dict[str, Any])
    except _NOT_READ:
        return "no reason given"
    said = decoded.get("detail") or decoded.get("title")
    return said[: LIMITS.text] if isinstance(said, str) else "no reason given"


def _seconds(header: str | None) -> float | None:
    """Return what ``Retry-After`` says: seconds, or a date."""
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
