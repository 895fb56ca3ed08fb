"""Options of ``spark.read.format("taskqueue")`` for reading a journal, with the names that Spark users expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.columns import DAMAGED, EVENTS, MISSING
from taskqueue_spark.offsets import Offsets
from taskqueue_spark.option_values import OptionValues
from taskqueue_spark.sink.store import STORE_OPTIONS, SparkStore

OffsetMap = Literal["earliest", "latest"] | Offsets
NAMES = (
    "resource", *STORE_OPTIONS, "path", "startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp",
    "events", "keys", "splitsPerShard", "fetchSize", "batchSize", "pushdown", "maxEventsPerTrigger",
    "maxSpanPerTrigger", "failOnDataLoss",
)  # fmt: skip
_OF_REDIS = ("url", "urlEnv", "prefix", "partitions", "fetchSize")
_EVENTS = EVENTS | {DAMAGED, MISSING}


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options for reading a journal, converted and checked."""

    backend: Literal["redis", "lines"]
    store: SparkStore
    """the Redis store; has no effect if ``backend`` is ``lines``"""
    path: str
    starting: OffsetMap
    ending: OffsetMap
    since: int | None
    """microseconds since 1970"""
    until: int | None
    events: frozenset[str] | None
    keys: frozenset[str] | None
    splits: int
    """number of ranges into which a shard is divided; 0: a number that depends on the shard's size"""
    fetch: int
    batch: int
    pushdown: bool
    max_events: int | None
    max_span: float | None
    """maximum time span of one micro-batch, in seconds"""
    fail: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """Convert the options that Spark passes. Raises `InvalidInput` or `ConfigurationError`."""
        given = OptionValues(options, NAMES)
        if "path" in given and not {"url", "urlenv"} & given.keys():
            backend = given.choice("backend", "lines", "redis")
        else:
            backend = given.choice("backend", "redis", "lines")
        if backend == "lines" and not given.get("path"):
            allowed = "a file, a folder or a pattern, with backend=lines"
            raise InvalidInput("option path", "nothing", allowed)
        for name in ("path",) if backend == "redis" else _OF_REDIS:
            if given.text(name):
                other = "lines" if backend == "redis" else "redis"
                problem, allowed = (
                    f"a value with backend={backend}",
                    f"a value only with backend={other}",
                )
                raise InvalidInput(f"option {name}", problem, allowed)
        events, keys = (given.names(name) for name in ("events", "keys"))
        if events is not None and not _EVENTS.issuperset(events):
            raise InvalidInput("option events", "an unknown event", ", ".join(sorted(_EVENTS)))
        most = 2**40
        return cls(
            backend=cast("Literal['redis', 'lines']", backend),
            store=SparkStore.read(options, name="redis") if backend == "redis" else SparkStore(),
            path=given.get("path", ""),
            starting=_parse_offsets(given, "startingOffsets", "earliest"),
            ending=_parse_offsets(given, "endingOffsets", "latest"),
            since=given.time("startingTimestamp"),
            until=given.time("endingTimestamp"),
            events=None if events is None else frozenset(events),
            keys=None if keys is None else frozenset(keys),
            splits=given.whole("splitsPerShard", 1, 1000) or 0,
            fetch=given.whole("fetchSize", 1, 100_000) or 500,
            batch=given.whole("batchSize", 1, 1_000_000) or 10_000,
            pushdown=given.flag("pushdown", default=False),
            max_events=given.whole("maxEventsPerTrigger", 1, most),
            max_span=given.seconds("maxSpanPerTrigger"),
            fail=given.flag("failOnDataLoss", default=True),
        )

    def check(self, *, stream: bool) -> None:
        """Raise `InvalidInput` for an option that has no effect in this kind of read: a stream, or a batch read."""
        ignored = {
            "endingOffsets": stream and self.ending != "latest",
            "pushdown": stream and self.pushdown,
            "maxEventsPerTrigger": not stream and self.max_events is not None,
            "maxSpanPerTrigger": not stream and self.max_span is not None,
        }
        for name, wrong in ignored.items():
            if wrong:
                here, there = ("read", "readStream")[:: -1 if stream else 1]
                raise InvalidInput(
                    f"option {name}", f"a value with {here}", f"a value only with {there}"
                )


def resource_of(options: Mapping[str, str]) -> str:
    """Return the resource to read: ``journal``, ``dead_letters`` or ``tasks``. Raises `InvalidInput`."""
    return OptionValues(options).choice("resource", "journal", "dead_letters", "tasks")


def _parse_offsets(
    given: OptionValues, name: str, default: Literal["earliest", "latest"]
) -> OffsetMap:
    value = given.get(name.lower(), default)
    if value.lower() in {"earliest", "latest"}:
        return cast('Literal["earliest", "latest"]', value.lower())
    return Offsets.parse(f"option {name}", value)
