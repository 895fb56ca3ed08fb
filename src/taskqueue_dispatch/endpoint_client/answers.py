"""The meaning of a server's answer. Errors contain nothing of the body except the server's own error text.

====================== ==================================================================================
status of a POST       meaning
====================== ==================================================================================
200 201 202            depends on the body: see `read`
400 413 415 422        `JobFailedAnswer`, final: the payload is refused, and would be refused everywhere
401 403 404 405        `JobFailedAnswer` by the server: the endpoint is misconfigured; the job is not at fault
408 425 429 503        `Busy`, with the server's Retry-After
502 504                `EndpointUnreachable`: a proxy answered; the server may have received the job
500, any other         `JobFailedAnswer`, by the server unless the body reports that the job has failed; redirects
                       are not followed
====================== ==================================================================================

When a job's status is polled, only the body can report that the job has failed: 404 and 410 are `Missing`, 408, 425,
429 and 503 are `Busy`, and any other unusable answer is `EndpointUnreachable`, so the server is polled again. An
exception is a good response that is a stream, too large or compressed: it would be the same the next time, so it is a
final `JobFailedAnswer`.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping

import msgspec

from taskqueue_core.capabilities import Seen
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_json, in_bytes
from taskqueue_dispatch.models import ModelConfig, ModelType


class Done(msgspec.Struct, frozen=True):
    """The answer if the job succeeded."""

    result: bytes
    """the job's result as JSON text"""


class JobAcceptedAnswer(msgspec.Struct, frozen=True):
    """The answer if the server has accepted the job, with the server's id for the job."""

    remote_id: str


class JobRunningAnswer(msgspec.Struct, frozen=True):
    """The answer if the job is still running."""

    progress: float | str | None = None


class Missing(msgspec.Struct, frozen=True):
    """The answer if the server does not know the job: perhaps the job never arrived, or the server has restarted."""


class Busy(msgspec.Struct, frozen=True):
    """The answer if the server cannot accept the job at the moment. This does not count as a failure."""

    retry_after: float | None = None


class EndpointUnreachable(msgspec.Struct, frozen=True):
    """The result if no complete response arrived, a proxy could not get one, or the response to a poll is unusable."""

    error: str
    sent: bool
    """whether the server may have received the request"""


class JobFailedAnswer(msgspec.Struct, frozen=True):
    """The answer if the job has failed, or if the response cannot be used."""

    error: str
    final: bool = False
    """whether the job would fail again, even on other servers"""
    by_server: bool = False
    """whether the server is at fault, so that the failure counts for the endpoint's circuit breaker"""
    reason: str = "refused_by_server"
    """reason of the dead letter if the failure is final"""


Answer = (
    Done
    | JobAcceptedAnswer
    | JobRunningAnswer
    | Missing
    | Busy
    | EndpointUnreachable
    | JobFailedAnswer
)


DONE = frozenset({"success", "completed", "done"})
"""statuses of a job that succeeded, in any letter case; a status in neither `DONE` nor `FAILED` means running"""
FAILED = frozenset({"failed", "error"})
LONGEST_REST = 300.0
"""maximum number of seconds for which a ``Retry-After`` is obeyed; a larger value is reduced to this one"""

_GOOD = frozenset({200, 201, 202})
_BUSY = frozenset({408, 425, 429, 503})
_GONE = frozenset({404, 410})
_ON_THE_WAY = frozenset({502, 504})
_REFUSED = frozenset({400, 413, 415, 422})
_MISCONFIGURED = {
    401: "the endpoint requires credentials",
    403: "the endpoint denied access",
    404: "the endpoint's path was not found",
    405: "the endpoint's path does not accept POST",
}
_IDS = ("job_id", "id")
_OURS = re.compile(r"[0-9a-f]{10}-[0-9a-f]{32}")
"""pattern of the ids that dispatchers give to jobs: see `taskqueue_dispatch.names.job_id`"""
_ERROR_TEXT = 1000
_ACTIVE = 1_000_000
_REDIRECTS = range(300, 400)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value = msgspec.json.Decoder()


class EndpointReply(msgspec.Struct, frozen=True):
    """A complete HTTP response."""

    status: int
    body: bytes
    retry_after: str | None = None
    streamed: bool = False
    """whether the body is the last value of a stream"""


class _Health(msgspec.Struct):
    active_jobs: int
    jobs: list[str] | None = None


_health = msgspec.json.Decoder(_Health)


def read(reply: EndpointReply, job: str, config: ModelConfig) -> Answer:
    """Return what the response to the POST of a job means.

    A valid body is a JSON object with a ``status``, and ``result``, ``error`` or the server's id of the job. For a
    sync model, any other JSON is the result; an object with a successful status but without ``result`` is itself the
    result. The id may be missing only for an async model without polling; the job's own id is then used.
    """
    if reply.status in _GOOD:
        return _read_good(reply, job, config)
    if reply.status in _BUSY:
        return Busy(_wait(reply.retry_after))
    shown = _shown(reply)
    if reply.status in _ON_THE_WAY:
        return EndpointUnreachable(shown, sent=True)
    fields = None if _problem(reply.body) else _fields(reply.body)
    if fields is not None and _status_of(fields) in FAILED:
        return JobFailedAnswer(
            f"HTTP {reply.status}: {_error(fields)}", final=reply.status in _REFUSED
        )
    if reply.status in _REFUSED:
        return JobFailedAnswer(shown, final=True)
    redirected = "redirects are not followed" if reply.status in _REDIRECTS else None
    why = _MISCONFIGURED.get(reply.status, redirected)
    return _unusable(f"{shown}: {why}" if why else shown)


def read_status(reply: EndpointReply, requested: str, config: ModelConfig) -> Answer:
    """Return what the response to a poll for the id ``requested`` means."""
    if reply.status in _GONE:
        return Missing()
    if reply.status in _BUSY:
        return Busy(_wait(reply.retry_after))
    if reply.status not in _GOOD:
        return EndpointUnreachable(_shown(reply), sent=True)
    return _by_status(reply.body, requested, config)


def read_observed(reply: EndpointReply) -> Seen | None:
    """Return a server's health report: the number of running jobs and, if the server lists them, their ids.

    Return ``None`` for any status except 200, and for a body that is not such a report.
    """
    try:
        decoded = _health.decode(reply.body) if reply.status == 200 else None  # noqa: PLR2004 - the HTTP status OK
    except (ValueError, RecursionError):
        return None
    if decoded is None or not 0 <= decoded.active_jobs <= _ACTIVE:
        return None
    return Seen(
        active=decoded.active_jobs, jobs=None if decoded.jobs is None else frozenset(decoded.jobs)
    )


def _read_good(reply: EndpointReply, job: str, config: ModelConfig) -> Answer:
    problem = _problem(reply.body)
    if problem:
        return _unusable(f"HTTP {reply.status}: {problem}")
    fields = _fields(reply.body)
    if fields is not None and _names_another(fields, job, config):
        return _unusable(f"{_shown(reply)}: the response is about another job")
    failed = fields is not None and not _status_of(fields) and _plain(fields, "error") is not None
    if reply.streamed and fields is not None and failed:
        return JobFailedAnswer(_error(fields))
    if config.model_type is ModelType.SYNC and (fields is None or "status" not in fields):
        return Done(reply.body)
    if fields is None:
        return _unusable(f"{_shown(reply)}: the body is not an object with a job id")
    ended = _ended(fields, reply.body)
    return _taken(reply, fields, job, config) if ended is None else ended


def _taken(
    reply: EndpointReply, fields: Mapping[str, msgspec.Raw], job: str, config: ModelConfig
) -> JobAcceptedAnswer | JobFailedAnswer:
    if not _status_of(fields) and "status" in fields:
        return _unusable(f"{_shown(reply)}: the status in the body is not text")
    names = _names(config)
    given = _id(fields, names)
    if given is not None:
        return JobAcceptedAnswer(given)
    asked_for = config.poll_endpoint_template is not None or config.model_type is ModelType.SYNC
    if not asked_for and not set(names) & fields.keys():
        return JobAcceptedAnswer(job)
    return _unusable(f"{_shown(reply)}: the job was accepted without a valid {' or '.join(names)}")


def _unusable(error: str) -> JobFailedAnswer:
    return JobFailedAnswer(error, by_server=True)


def _names_another(fields: Mapping[str, msgspec.Raw], job: str, config: ModelConfig) -> bool:
    """Return whether an answer has the id of another job, as dispatchers form it."""
    given = _id(fields, _names(config))
    return given is not None and given != job and _OURS.fullmatch(given) is not None


def _by_status(body: bytes, requested: str, config: ModelConfig) -> Answer:
    problem = _problem(body)
    fields = None if problem else _fields(body)
    if fields is None:
        return EndpointUnreachable(
            problem or f"JSON that is not an object; length in bytes: {len(body)}", sent=True
        )
    names = _names(config)
    given = _id(fields, names)
    if given != requested and set(names) & fields.keys():
        return EndpointUnreachable("the response is about another job", sent=True)
    ended = _ended(fields, body)
    if ended is not None:
        return ended
    if not _status_of(fields):
        return EndpointUnreachable(
            f"JSON without a status; length in bytes: {len(body)}", sent=True
        )
    return JobRunningAnswer(_progress(fields))


def _ended(fields: Mapping[str, msgspec.Raw], body: bytes) -> Done | JobFailedAnswer | None:
    name = _status_of(fields)
    if name in DONE:
        result = fields.get("result")
        return Done(body if result is None else bytes(result))
    if name in FAILED:
        return JobFailedAnswer(_error(fields), final=_plain(fields, "final") is True)
    return None


def _problem(body: bytes) -> str | None:
    try:
        check_json("answer", body, "result")
    except InvalidInput as error:
        return f"the answer is {error.got}"
    return None


def _fields(body: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _object.decode(body)
    except msgspec.ValidationError:
        return None


def _status_of(fields: Mapping[str, msgspec.Raw]) -> str:
    name = _plain(fields, "status")
    return name.strip().casefold() if isinstance(name, str) else ""


def _names(config: ModelConfig) -> tuple[str, ...]:
    return _IDS if config.id_field is None else (config.id_field,)


def _id(fields: Mapping[str, msgspec.Raw], names: tuple[str, ...]) -> str | None:
    """Return the server's id of the job, or ``None`` if it is missing or cannot be part of a URL's path."""
    result = next((_plain(fields, name) for name in names if name in fields), None)
    if type(result) is int:
        result = str(result)
    if not isinstance(result, str) or not 0 < len(result) <= LIMITS.name:
        return None
    return result if result.isprintable() and result not in {".", ".."} else None


def _progress(fields: Mapping[str, msgspec.Raw]) -> float | str | None:
    value = _plain(fields, "progress")
    if isinstance(value, str):
        return value[: LIMITS.text]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _error(fields: Mapping[str, msgspec.Raw]) -> str:
    error = _plain(fields, "error")
    return shown(error.get("message") if isinstance(error, dict) else error)


def shown(value: object) -> str:
    """Return a server's error as one line of at most 1000 printable characters; a default if empty or not text."""
    if not isinstance(value, str) or not value.strip():
        return "the server reported a failure"
    return "".join(c if c.isprintable() else " " for c in value[:_ERROR_TEXT]).strip()


def _plain(fields: Mapping[str, msgspec.Raw], name: str) -> object:
    try:
        result: object = _value.decode(fields[name]) if name in fields else None
    except (ValueError, RecursionError):  # the field has a number out of range, such as 1e400
        return None
    return result


def _shown(reply: EndpointReply) -> str:
    return f"HTTP {reply.status} with {in_bytes(len(reply.body))}"


def _wait(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_REST) if seconds == seconds else None  # noqa: PLR0124 - only NaN differs from itself
