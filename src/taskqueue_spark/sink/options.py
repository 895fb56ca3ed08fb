"""Options of ``df.write.format("taskqueue")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, cast

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.option_values import OptionValues
from taskqueue_spark.sink.store import STORE_OPTIONS, SparkStore

SINK_OPTIONS = (
    "resource", "queue", "chunkSize", "wait", "rateLimit", "writers", "replayHorizon", "onInvalid", "invalidPath",
    "onConflict",
)  # fmt: skip
REDRIVE_OPTIONS = ("resource", "queue", "action", "chunkSize")
_YEAR = 365 * 86_400.0


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for publishing. Durations are in seconds."""

    store: SparkStore
    queue: str | None = None
    """the key (queue) for rows that do not name one"""
    chunk: int = 250
    """maximum number of tasks in one publish; it is small, so that other clients wait only a few milliseconds"""
    wait: float = 3600.0
    """seconds to wait without progress for a full queue, or for a store that is unavailable"""
    rate: float | None = None
    """maximum number of tasks per second that one partition publishes"""
    replay_horizon: float | None = None
    """seconds for which a queue must remember the id of an ended task, so that a replay publishes nothing twice"""
    on_invalid: Literal["fail", "skip"] = "fail"
    invalid_path: str | None = None
    """folder for the skipped rows, each with the reason"""
    on_conflict: Literal["fail", "count"] = "fail"

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Convert the options that Spark passes. Raises `InvalidInput` or `ConfigurationError`."""
        given = OptionValues(options, (*SINK_OPTIONS, *STORE_OPTIONS))
        rate, writers = given.number("rateLimit", 0.001, _YEAR), given.whole("writers", 1, 100_000)
        if (rate is None) != (writers is None):
            raise ConfigurationError(
                "options rateLimit and writers: only one is set; set both or neither. rateLimit is the rate of the "
                "whole job, and writers is the number of its partitions that are written at the same time"
            )
        on_invalid = given.choice("onInvalid", "fail", "skip")
        if given.text("invalidPath") is not None and on_invalid == "fail":
            raise ConfigurationError("option invalidPath is allowed only with onInvalid=skip")
        wait = given.number("wait", 0, _YEAR)
        return cls(
            store=SparkStore.read(options),
            queue=given.queue(),
            chunk=given.whole("chunkSize", 1, 1000) or 250,
            wait=3600.0 if wait is None else wait,
            rate=rate / writers if rate and writers else None,
            replay_horizon=given.number("replayHorizon", 0, _YEAR),
            on_invalid=cast("Literal['fail', 'skip']", on_invalid),
            invalid_path=given.text("invalidPath"),
            on_conflict=cast("Literal['fail', 'count']", given.choice("onConflict", "fail", "count")),
        )  # fmt: skip


class RedriveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for redriving or discarding dead letters."""

    store: SparkStore
    queue: str | None = None
    """the key (queue) for rows that do not name one"""
    action: Literal["redrive", "discard"] = "redrive"
    chunk: int = 100
    """maximum number of dead letters in one call"""

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Convert the options that Spark passes, as `SinkOptions.read` does."""
        given = OptionValues(options, (*REDRIVE_OPTIONS, *STORE_OPTIONS))
        return cls(
            store=SparkStore.read(options),
            queue=given.queue(),
            action=cast("Literal['redrive', 'discard']", given.choice("action", "redrive", "discard")),
            chunk=given.whole("chunkSize", 1, 1000) or 100,
        )  # fmt: skip
