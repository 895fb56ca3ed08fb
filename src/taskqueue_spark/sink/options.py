"""What the sink can be told: the options of ``df.write.format("taskqueue")``, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self, cast

import msgspec

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_spark.sink.store import STORE_OPTIONS, SparkStore

_OF_SPARK = frozenset({"path", "checkpointlocation", "queryname"})
"""options that Spark puts among ours, beside those with a dot"""
_CHUNKS = range(1, 1001)
_DAY = 86_400.0
_DIGITS = 9


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tasks are published. Durations are seconds."""

    store: SparkStore
    queue: str | None = None
    """the key of rows without one"""
    chunk: int = 250
    """tasks of one publish at most, fewer where they are large: what others wait for are a few milliseconds"""
    wait: float = 3600.0
    """how long without any progress a queue may refuse for want of room, or the store be out of reach"""
    rate: float | None = None
    """tasks per second that one partition may publish"""
    replay_horizon: float | None = None
    """how long after its end a task must be known still: rows that are older are not published again"""
    on_invalid: Literal["fail", "skip"] = "fail"
    invalid_path: str | None = None
    """a folder for the rows that were skipped, each with its reason"""
    on_conflict: Literal["fail", "count"] = "fail"

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Read options. Raises `InvalidInput` or `ConfigurationError` that name what is wrong, never the value."""
        given = given_options(options, _NAMES[cls])
        if (queue := given.get("queue")) is not None:
            check_name("option queue", queue)
        rate, writers = _number(given, "rateLimit", None, 0.001), given.get("writers")
        if (rate is None) != (writers is None):
            raise ConfigurationError(
                "options rateLimit and writers: one is set; allowed: both or neither: the rate is of the whole job, "
                "and writers says how many of its partitions are written at the same time"
            )
        if rate is not None:
            rate /= _whole(given, "writers", 1, range(1, 100_001))
        on_invalid = _parse_choice(given, "onInvalid", "fail", "skip")
        if given.get("invalidpath") is not None and on_invalid == "fail":
            raise ConfigurationError("option invalidPath: set; allowed with: onInvalid=skip")
        return cls(
            store=SparkStore.read(options),
            queue=queue,
            chunk=_whole(given, "chunkSize", 250, _CHUNKS),
            wait=_number(given, "wait", 3600.0, 0) or 0.0,
            rate=rate,
            replay_horizon=_number(given, "replayHorizon", None, 0),
            on_invalid=cast("Literal['fail', 'skip']", on_invalid),
            invalid_path=given.get("invalidpath"),
            on_conflict=cast(
                "Literal['fail', 'count']", _parse_choice(given, "onConflict", "fail", "count")
            ),
        )


class RedriveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with dead letters."""

    store: SparkStore
    queue: str | None = None
    """the key of rows without one"""
    action: Literal["redrive", "discard"] = "redrive"
    chunk: int = 100
    """dead letters of one call"""

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Read options, as `SinkOptions.read` does."""
        given = given_options(options, _NAMES[cls])
        if (queue := given.get("queue")) is not None:
            check_name("option queue", queue)
        action = _parse_choice(given, "action", "redrive", "discard")
        return cls(
            store=SparkStore.read(options),
            queue=queue,
            action=cast("Literal['redrive', 'discard']", action),
            chunk=_whole(given, "chunkSize", 100, _CHUNKS),
        )


_NAMES = {
    SinkOptions: (
        "resource", "queue", "chunkSize", "wait", "rateLimit", "writers", "replayHorizon", "onInvalid", "invalidPath",
        "onConflict",
    ),
    RedriveOptions: ("resource", "queue", "action", "chunkSize"),
}  # fmt: skip


def resource_of(options: Mapping[str, str]) -> Literal["tasks", "dead_letters"]:
    """Return what is written to: ``tasks`` (they are published), or ``dead_letters`` (redriven or discarded)."""
    given = {name.lower(): value for name, value in options.items()}
    return cast(
        "Literal['tasks', 'dead_letters']",
        _parse_choice(given, "resource", "tasks", "dead_letters"),
    )


def given_options(options: Mapping[str, str], own: Sequence[str]) -> dict[str, str]:
    """Return options by their names in small letters.

    Raises `ConfigurationError` for one that is neither among ``mine`` nor of the store: it may be misspelt.
    """
    given = {name.lower(): value for name, value in options.items()}
    names = (*own, *STORE_OPTIONS)
    known = {name.lower() for name in names} | _OF_SPARK
    unknown = sorted(name for name in given if name not in known and "." not in name)
    if unknown:
        shown = ", ".join(name[:50] for name in unknown)
        raise ConfigurationError(f"unknown options: {shown}; allowed: {', '.join(names)}")
    if given.get("path"):
        raise ConfigurationError("option path: set; allowed: save() and load() without one")
    return given


def _parse_choice(given: Mapping[str, str], name: str, *allowed: str) -> str:
    text = given.get(name.lower(), allowed[0]).lower()
    if text not in allowed:
        raise InvalidInput(f"option {name}", "an unknown value", " or ".join(allowed))
    return text


def _number(
    given: Mapping[str, str], name: str, default: float | None, least: float
) -> float | None:
    text = given.get(name.lower())
    if text is None:
        return default
    allowed = f"a number from {least:g} to {365 * _DAY:g}"
    try:
        number = float(text)
    except ValueError:
        raise InvalidInput(f"option {name}", "text that is not a number", allowed) from None
    if not math.isfinite(number) or not least <= number <= 365 * _DAY:
        raise InvalidInput(f"option {name}", "a number out of range", allowed)
    return number


def _whole(given: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    text = given.get(name.lower())
    if text is None:
        return default
    names = f"a whole number from {allowed[0]} to {allowed[-1]}"
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
        raise InvalidInput(f"option {name}", "text that is not a whole number", names)
    if int(text) not in allowed:
        raise InvalidInput(f"option {name}", "a number out of range", names)
    return int(text)
