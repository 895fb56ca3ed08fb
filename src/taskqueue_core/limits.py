"""The size limits on input, and checks that take linear time and raise `InvalidInput` without repeating the value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate

import msgspec

from taskqueue_core.errors import InvalidInput, TooLarge


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The size limits on input. Each description names the unit."""

    name: int = 200
    """maximum number of characters of a key, id, tenant, ordering key, receipt, or name of a model or server"""
    payload: int = 256 * 1024
    """maximum number of bytes of a task's payload as JSON text"""
    decoded: int = 8 * 1024 * 1024
    """maximum number of bytes of a payload, result or text before a codec encodes it, and after it is decoded"""
    result: int = 256 * 1024
    """maximum number of bytes of a result as JSON text"""
    depth: int = 100
    """maximum nesting depth of arrays and objects in a payload or result; some JSON parsers support no more"""
    headers: int = 32
    """maximum number of headers of a task"""
    header_bytes: int = 8 * 1024
    """maximum number of bytes of a task's header names and values together"""
    tags: int = 8
    """maximum number of tags of a task"""
    tag: int = 100
    """maximum number of characters of a tag"""
    attempts: int = 50_000
    """maximum number of attempts of a task, including snoozes and those before a redrive; then it is a dead letter"""
    retry_tokens: int = 100
    """maximum number of retry tokens that are kept for a task to detect repeated calls; the oldest are dropped first"""
    text: int = 4 * 1024
    """maximum number of characters of an error, reason or progress text; longer text is cut, but refused in a frame"""
    traceback: int = 8 * 1024
    """maximum number of bytes of a traceback; of a longer one, the last bytes are kept"""
    frame: int = 1024 * 1024
    """maximum number of bytes of a websocket frame, in either direction"""
    keys: int = 1000
    """maximum number of keys of a subscription"""
    batch: int = 1000
    """maximum number of tasks in an HTTP request, receipts in a frame, or ids in a look-up"""
    parents: int = 1000
    """maximum number of tasks that a task waits for"""
    call: int = 10_000
    """maximum number of tasks, deliveries or receipts in one call of a backend; maximum ``limit`` of a receive"""
    features: int = 100
    """maximum number of features that a ``hello`` or ``welcome`` frame may name"""
    credit: int = 10_000
    """maximum number of a worker's deliveries on one socket: those that it has, plus those that it has credit for"""
    held: int = 64 * 1024 * 1024
    """maximum number of bytes of the tasks that a worker holds on one socket, as payloads, headers and inputs"""
    unknown: int = 1000
    """maximum number of receipts that a worker may name on a socket although it does not hold them"""
    body: int = 16 * 1024 * 1024
    """maximum number of bytes in the body of an HTTP request"""
    url: int = 2000
    """maximum number of characters of a URL"""
    slots: int = 10_000
    """maximum number of slots of one endpoint, and of jobs that one server may run at once"""
    schedule_name: int = 170
    """maximum number of characters of the name of a schedule; the id of its task is this name and an instant"""
    steps: int = 1000
    """maximum number of steps of a workflow"""
    workflow: int = 4 * 1024 * 1024
    """maximum number of bytes of all steps of a workflow as JSON text"""
    workflow_id: int = 100
    """maximum number of characters of the id of a workflow; the id of a task in it is this one and the step's name"""
    step_name: int = 99
    """maximum number of characters of the name of a step of a workflow"""
    event: int = 64 * 1024
    """maximum number of bytes of an event that a task streams, as JSON text"""
    channel: int = 50
    """maximum number of characters of the name of a channel of events"""
    document: int = 64 * 1024
    """maximum number of bytes of the JSON document that a slot pool stores for a model"""


LIMITS = Limits()
TASK_RUN_BYTES = 1024 * 1024
"""maximum number of bytes of a Prefect task run as JSON text; a Prefect worker accepts no larger message"""

_NUMBER = (int, float)  # ``int | float`` in a function would create a union in each call
_MOST_CUT = 3
"""maximum number of bytes of the half of a character that `clean_traceback` leaves out"""
_NAME = re.compile(r"[A-Za-z0-9_<][A-Za-z0-9._:@=+<>~-]*")
_END_OF_TIME = 253_402_300_800.0  # the start of the year 10000, the end of Python's datetime
_DIGEST_SIZES = range(16, 65)
_CENTURY = 100 * 366 * 86_400.0
_json = msgspec.json.Decoder(msgspec.Raw)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_RUN = re.compile(rb"\[+|\]+")
_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 4301
_FEW = 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def kind_of(value: object) -> str:
    """Describe a value without showing it: its type and, if it has one, its length."""
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


def in_bytes(number: int) -> str:
    """Return a size as text, such as "1 byte" or "17 bytes"."""
    return "1 byte" if number == 1 else f"{number} bytes"


def clean_text(text: str) -> str:
    """Cut a text to `Limits.text` characters, and replace lone surrogates, which UTF-8 cannot encode."""
    return text[: LIMITS.text].encode("utf-8", "replace").decode()


def clean_traceback(text: str | None) -> str | None:
    """Return the last `Limits.traceback` bytes of a traceback, without half a character; ``None`` for an empty text."""
    if not text:
        return None
    return text.encode("utf-8", "replace")[-LIMITS.traceback :].decode("utf-8", "ignore")


def is_whole(traceback: str) -> bool:
    """Return whether a text of `clean_traceback` is certainly a whole traceback, and not the end of one."""
    return len(traceback.encode()) < LIMITS.traceback - _MOST_CUT


def escape_controls(text: str, *, keep: str = "") -> str:
    """Replace characters that a terminal would not print, such as escape sequences, with Python's escapes for them."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def check_name(field: str, value: object) -> None:
    """Check a key, id, tenant, ordering key or worker id: 1 to 200 ASCII letters, digits and some punctuation."""
    if isinstance(value, str) and len(value) <= LIMITS.name and _NAME.fullmatch(value):
        return
    got = kind_of(value)
    if isinstance(value, str) and 0 < len(value) <= LIMITS.name:
        # Showing one character reveals no secret, and the mistake may be hard to see without it.
        wrong = next((c for c in value if not _NAME.fullmatch(f"_{c}")), None)
        got += f" that starts with {value[0]!a}" if wrong is None else f" that contains {wrong!a}"
    raise InvalidInput(
        field,
        got,
        f"1 to {LIMITS.name} characters of A-Z a-z 0-9 . _ : @ = + < > ~ -, starting with a letter, digit, _ or <",
    )


def check_channel(field: str, value: object) -> None:
    """Check the name of a channel of events: as a key, but of at most 50 characters."""
    if isinstance(value, str) and len(value) <= LIMITS.channel and _NAME.fullmatch(value):
        return
    raise InvalidInput(
        field,
        kind_of(value),
        f"1 to {LIMITS.channel} characters of A-Z a-z 0-9 . _ : @ = + < > ~ -, starting with a letter, digit, _ or <",
    )


def check_label(field: str, value: object) -> None:
    """Check the name of a model or a server: any printable text of 1 to 200 characters."""
    if isinstance(value, str) and 0 < len(value) <= LIMITS.name and value.isprintable():
        return
    raise InvalidInput(field, kind_of(value), f"printable text of 1 to {LIMITS.name} characters")


def check_tag(field: str, value: object) -> None:
    """Check a tag of a task: printable text of 1 to 100 characters, without a blank at its start or end."""
    if (
        isinstance(value, str)
        and 0 < len(value) <= LIMITS.tag
        and value.isprintable()
        and value == value.strip()
    ):
        return
    raise InvalidInput(
        field,
        kind_of(value),
        f"printable text of 1 to {LIMITS.tag} characters, without a blank at its start or end",
    )


def check_tags(field: str, value: object) -> None:
    """Check the tags of a task: at most 8 different ones, as a tuple."""
    if not isinstance(value, tuple) or len(value) > LIMITS.tags:
        raise InvalidInput(field, kind_of(value), f"a tuple of at most {LIMITS.tags} texts")
    for tag in value:
        check_tag(field, tag)
    if len(set(value)) < len(value):
        raise InvalidInput(field, "the same tag twice", "different tags")


def check_number(field: str, value: object, lowest: int, highest: int) -> None:
    """Check that a value is a whole number from ``lowest`` to ``highest``."""
    if type(value) is int and lowest <= value <= highest:
        return
    raise InvalidInput(field, _number(value), f"a whole number from {lowest} to {highest}")


def check_choice(field: str, value: object, allowed: Sequence[str]) -> None:
    """Check that a value is one of some texts."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(field, kind_of(value), f"one of {', '.join(map(repr, allowed))}")


def check_json(field: str, value: object, limit: str) -> None:
    """Check that a value is one JSON text in UTF-8, within the limit on size of this name, and not nested too deeply.

    Raises `TooLarge` if it is too long, and otherwise `InvalidInput`.
    """
    if not isinstance(value, bytes):
        raise InvalidInput(field, kind_of(value), "JSON text, as bytes")
    _check_size(field, value, limit)
    try:
        value.decode()
        _json.decode(value)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"{kind_of(value)} that is not JSON", "JSON text") from error
    _check_depth(field, value)


def _check_size(field: str, value: bytes, limit: str) -> None:
    if len(value) > (most := getattr(LIMITS, limit)):
        raise TooLarge(field, kind_of(value), f"at most {most} bytes (limit {limit})")


def check_encoded(field: str, value: bytes, limit: str) -> None:
    """Check the size and the nesting depth of a text that is known to be JSON."""
    _check_size(field, value, limit)
    _check_depth(field, value)


def check_written(field: str, text: bytes, limit: str) -> None:
    """Check text that pydantic wrote: it is JSON, unless it has NaN, an infinity, or a number too long for Python."""
    size = len(text)
    # Each publish comes here, so the functions that find a fault are called only if there may be one.
    if size > getattr(LIMITS, limit) or text.count(b"[") + text.count(b"{") > LIMITS.depth:
        check_encoded(field, text, limit)
    # `count` is faster than `in`. These words are no JSON, unless they are part of a text.
    if text.count(b"NaN") or text.count(b"Infinity"):
        check_json(field, text, limit)
    if size >= len(_LONG):
        check_digits(field, text)


def _check_depth(field: str, value: bytes) -> None:
    if _too_deep(value):
        raise InvalidInput(
            field, f"{kind_of(value)}, nested too deeply", f"at most {LIMITS.depth} nested levels"
        )


def check_digits(field: str, text: bytes) -> None:
    """Check that JSON text contains no whole number of more than 4300 digits, which Python does not parse."""
    if len(text) < len(_LONG) or _LONG not in text.translate(_ONE_DIGIT):
        return
    if _LONG in _STRING.sub(b"", text).translate(_ONE_DIGIT):
        raise InvalidInput(field, "a long whole number", "at most 4300 digits; pass it as text")


def _too_deep(text: bytes) -> bool:
    if text.count(b"[") + text.count(b"{") <= LIMITS.depth:
        return False
    return deepest(_STRING.sub(b"", text).translate(_ONE_KIND, _NO_BRACKETS)) > LIMITS.depth


def deepest(brackets: bytes) -> int:
    """Return the nesting depth of balanced brackets ``[`` and ``]``, in linear time whatever their structure."""
    removed = 0
    # Each round removes the innermost pairs. When few of the brackets are innermost pairs, the rest consists of a few
    # long runs of equal brackets, which are cheap to count.
    while brackets and brackets.count(b"[]") * _FEW >= len(brackets):
        brackets = brackets.replace(b"[]", b"")
        removed += 1
    levels = (len(run) if run[:1] == b"[" else -len(run) for run in _RUN.findall(brackets))
    return removed + max(accumulate(levels), default=0)


def check_time(field: str, value: object) -> None:
    """Check that a time is a finite number of Unix seconds, from the year 1970 to the end of the year 9999."""
    if isinstance(value, _NUMBER) and not isinstance(value, bool) and 0 <= value < _END_OF_TIME:
        return
    raise InvalidInput(field, _number(value), "a time in the years 1970 to 9999, in Unix seconds")


def check_duration(field: str, value: object) -> None:
    """Check that a duration is a number of seconds from 0 to 3162240000 (100 years of 366 days)."""
    if isinstance(value, _NUMBER) and not isinstance(value, bool) and 0 <= value <= _CENTURY:
        return
    raise InvalidInput(
        field,
        _number(value),
        "a number of seconds, such as 600, from 0 to 3162240000 (about 100 years)",
    )


def duration(field: str, value: float | timedelta) -> float:
    """Return a duration in seconds. Raises `InvalidInput` as `check_duration` does."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    check_duration(field, seconds)
    return seconds


def check_digest(field: str, value: object) -> None:
    """Check the digest of a task's content: 16 to 64 bytes."""
    if isinstance(value, bytes) and len(value) in _DIGEST_SIZES:
        return
    raise InvalidInput(field, kind_of(value), "16 to 64 bytes")


def _number(value: object) -> str:
    return "a number that is not allowed" if type(value) in (int, float) else kind_of(value)


def check_headers(field: str, value: object) -> None:
    """Check the headers of a task: names and values must be printable text, within the limits on number and size."""
    if not isinstance(value, Mapping) or len(value) > LIMITS.headers:
        raise InvalidInput(
            field,
            kind_of(value),
            f"a mapping of names to texts with at most {LIMITS.headers} items",
        )
    size = 0
    for name, text in value.items():
        if (
            not isinstance(name, str)
            or not isinstance(text, str)
            or not (name + text).isprintable()
        ):
            raise InvalidInput(
                field,
                f"a header whose name is {kind_of(name)} and whose value is {kind_of(text)}",
                "printable text as names and values",
            )
        size += len(name.encode()) + len(text.encode())
    if size > LIMITS.header_bytes:
        raise InvalidInput(field, f"{size} bytes", f"at most {LIMITS.header_bytes} bytes in total")
