"""What ``format("taskqueue")`` can be told when it reads. Names are what Spark users expect; case does not matter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, cast

from pydantic import ValidationError

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_redis.addresses import StoreAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_spark.columns import DAMAGED, EVENTS, MISSING
from taskqueue_spark.offsets import Offsets

Resource = Literal["journal", "dead_letters", "tasks"]
OffsetMap = Literal["earliest", "latest"] | Offsets
_RESOURCES = ("journal", "dead_letters", "tasks")
_BACKENDS = ("redis", "lines")
_NAMES = (
    "resource", "backend", "url", "urlEnv", "prefix", "partitions", "path", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "events", "keys", "splitsPerShard", "fetchSize", "batchSize", "pushdown",
    "maxEventsPerTrigger", "maxSpanPerTrigger", "failOnDataLoss",
)  # fmt: skip
_OF_REDIS = ("url", "urlEnv", "prefix", "partitions", "fetchSize")
_MOST = 2**40


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a read of the journal, each checked."""

    backend: Literal["redis", "lines"]
    url: str | None
    url_env: str | None
    prefix: str | None
    partitions: int | None
    path: str
    starting: OffsetMap
    ending: OffsetMap
    since: int | None
    """microseconds"""
    until: int | None
    events: frozenset[str] | None
    keys: frozenset[str] | None
    splits: int
    """parts of a shard; 0: as many as its size asks for"""
    fetch: int
    batch: int
    pushdown: bool
    max_events: int | None
    max_span: float | None
    """seconds"""
    fail: bool

    @classmethod
    def of(cls, given: Mapping[str, str]) -> ReadOptions:
        """Read Spark's options. Raises `InvalidInput` that names the option, never its value."""
        known = {name.lower() for name in _NAMES}
        if any(name.lower() not in known and "." not in name for name in given):
            raise InvalidInput("options", "an unknown name", ", ".join(_NAMES))
        values = {name.lower(): value for name, value in given.items()}
        default = "lines" if "path" in values and not {"url", "urlenv"} & values.keys() else "redis"
        backend = cast(
            'Literal["redis", "lines"]',
            one_of("backend", values.get("backend", default), _BACKENDS),
        )
        if backend == "lines" and not values.get("path"):
            raise InvalidInput(
                "path", "nothing", "a file, a folder or a pattern, with backend=lines"
            )
        strange = ("path",) if backend == "redis" else _OF_REDIS
        for name in strange:
            if values.get(name.lower()):
                other = "lines" if backend == "redis" else "redis"
                raise InvalidInput(name, f"set, with backend={backend}", f"with backend={other}")
        starting = _parse_offsets(values, "startingOffsets", "earliest")
        ending = _parse_offsets(values, "endingOffsets", "latest")
        url, url_env = values.get("url"), values.get("urlenv")
        check_url(url, url_env)
        return cls(
            backend=backend,
            url=url,
            url_env=url_env,
            prefix=values.get("prefix"),
            partitions=_whole(values, "partitions", 1, 1024),
            path=values.get("path", ""),
            starting=starting,
            ending=ending,
            since=_parse_time(values, "startingTimestamp"),
            until=_parse_time(values, "endingTimestamp"),
            events=_events(values),
            keys=_names(values, "keys"),
            splits=_whole(values, "splitsPerShard", 1, 1000) or 0,
            fetch=_whole(values, "fetchSize", 1, 100_000) or 500,
            batch=_whole(values, "batchSize", 1, 1_000_000) or 10_000,
            pushdown=flag(values, "pushdown", default=False),
            max_events=_whole(values, "maxEventsPerTrigger", 1, _MOST),
            max_span=_span(values),
            fail=flag(values, "failOnDataLoss", default=True),
        )

    def check(self, *, stream: bool) -> None:
        """Raise `InvalidInput` where something is set that has no meaning for a stream, or for a read at once."""
        ignored = {
            "endingOffsets": stream and self.ending != "latest",
            "pushdown": stream and self.pushdown,
            "maxEventsPerTrigger": not stream and self.max_events is not None,
            "maxSpanPerTrigger": not stream and self.max_span is not None,
        }
        for name, wrong in ignored.items():
            if wrong:
                here, there = ("read", "readStream")[:: -1 if stream else 1]
                raise InvalidInput(name, f"set, with {here}", f"with {there}")


def redis_settings(
    url: str | None, url_env: str | None, prefix: str | None, partitions: int | None = None
) -> RedisSettings:
    """Return settings where these stand before what the environment says. Raises `ConfigurationError`."""
    if url_env is not None:
        url = os.environ.get(url_env)
        if url is None:
            raise ConfigurationError(
                "urlEnv: this process has no such environment variable; allowed: one that the driver and all "
                "executors have (spark.executorEnv.…)"
            )
    fields = {"url": url, "prefix": prefix, "partitions": partitions}
    try:
        return RedisSettings.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise ConfigurationError(f"the options and TASKQUEUE_REDIS_… settings: {faults}") from None


def check_url(url: str | None, url_env: str | None) -> None:
    """Raise where a URL is told twice, or has a password, which Spark would show to whoever sees a plan."""
    if url is not None and url_env is not None:
        raise InvalidInput("url, urlEnv", "both", "one of them, or none: then TASKQUEUE_REDIS_URL")
    if url is not None and StoreAddress.of(url, "url").password:
        allowed = "a URL without one; the password in TASKQUEUE_REDIS_PASSWORD or …_PASSWORD_FILE, or the URL by urlEnv"
        raise InvalidInput("url", "a URL with a password", allowed)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return one of some words, whatever its case. Raises `InvalidInput`."""
    if value.lower() not in allowed:
        raise InvalidInput(name, "an unknown value", ", ".join(allowed))
    return value.lower()


def resource_of(given: Mapping[str, str]) -> Resource:
    """Return what is to be read. Raises `InvalidInput`."""
    values = {name.lower(): value for name, value in given.items()}
    return cast("Resource", one_of("resource", values.get("resource", "journal"), _RESOURCES))


def flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return a yes or no; ``told`` has names in lower case. Raises `InvalidInput`."""
    value = values.get(name.lower())
    if value is None:
        return default
    return one_of(name, value, ("true", "false")) == "true"


def _whole(values: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    value = values.get(name.lower())
    if value is None:
        return None
    allowed = f"a whole number from {least} to {most}"
    try:
        number = int(value)
    except ValueError:
        raise InvalidInput(name, "text", allowed) from None
    if not least <= number <= most:
        raise InvalidInput(name, "a number out of range", allowed)
    return number


def _span(values: Mapping[str, str]) -> float | None:
    value = values.get("maxspanpertrigger")
    if value is None:
        return None
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    number, unit = (value[:-1], value[-1]) if value[-1:] in units else (value, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1
    if not 0 < seconds < 1e9:  # noqa: PLR2004 - which refuses what is no number, too
        raise InvalidInput(
            "maxSpanPerTrigger",
            "text that is not a duration",
            "seconds, or a number with s, m, h or d",
        )
    return seconds


def _parse_time(values: Mapping[str, str], name: str) -> int | None:
    value = values.get(name.lower())
    if value is None:
        return None
    allowed = "an ISO 8601 time (2026-01-31T12:00:00Z; UTC by default)"
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidInput(name, "text that is not a time", allowed) from None
    return microseconds(moment)


def microseconds(moment: datetime) -> int:
    """Return a time in microseconds; one that knows no zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _names(values: Mapping[str, str], name: str) -> frozenset[str] | None:
    value = values.get(name)
    if value is None:
        return None
    names = frozenset(part.strip() for part in value.split(",")) - {""}
    if not names:
        raise InvalidInput(name, "nothing", "names with commas between them")
    return names


def _events(values: Mapping[str, str]) -> frozenset[str] | None:
    names = _names(values, "events")
    if names is not None and not names <= EVENTS | {DAMAGED, MISSING}:
        raise InvalidInput(
            "events", "an unknown event", ", ".join(sorted({*EVENTS, DAMAGED, MISSING}))
        )
    return names


def _parse_offsets(
    values: Mapping[str, str], name: str, default: Literal["earliest", "latest"]
) -> OffsetMap:
    value = values.get(name.lower(), default)
    if value.lower() in {"earliest", "latest"}:
        return cast('Literal["earliest", "latest"]', value.lower())
    return Offsets.parse(name, value)
