"""Options of the streaming service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from taskqueue_core.errors import InvalidInput

_LONGEST = 1e9
"""maximum duration in seconds, about 30 years, which can still be subtracted from dates in Python and Spark"""


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of the streaming service. Raises `InvalidInput`."""

    out: Path
    """folder for the results, which all machines of the cluster must see under this path"""
    source: Mapping[str, str] = field(default_factory=dict)
    """options of the data source; see docs/pipeline.md"""
    format: str = "taskqueue"
    trigger: float = 10.0
    """seconds between the starts of two batches"""
    once: bool = False
    """whether to stop once the current journal has been read"""
    max_events: int | None = 500_000
    """maximum number of transitions in a batch; ``None``: no limit"""
    window: int = 60
    """length of a window, in seconds"""
    stuck_after: float = 600.0
    """seconds in flight after which a task is reported as stuck"""
    waiting_after: float | None = None
    """seconds of waiting after which a task is reported; ``None``: no task is reported"""
    failure_share: float = 0.1
    """minimum share of failed executions in a window for a report of rising failures"""
    failure_growth: float = 2.0
    """minimum ratio of a window's share of failures to the share in earlier windows, for a report of rising failures"""
    failure_least: int = 20
    """minimum number of executions in a window for a report of rising failures"""
    keep: int = 120
    """number of earlier windows that are kept: they can still change, and new windows are compared with them"""
    ledger: bool = True
    """whether to compare the journal with the ledgers of the store, if the store has any"""

    def __post_init__(self) -> None:
        if {"events", "keys", "endingtimestamp"} & {name.lower() for name in self.source}:
            raise InvalidInput(
                "source",
                "options that select events, keys or an end",
                "options that read the whole journal",
            )
        for name in ("trigger", "stuck_after", "waiting_after"):
            if (seconds := getattr(self, name)) is not None:
                _check(name, seconds, 0.0, _LONGEST)
        _check("failure_growth", self.failure_growth, 1.0)
        _check("failure_share", self.failure_share, 0.0, 1.0)
        for name in ("window", "failure_least", "keep"):
            _check(name, getattr(self, name), 1)
        if self.max_events is not None:
            _check("max_events", self.max_events, 1)

    @property
    def folder(self) -> Path:
        """The folder of the service's own files."""
        return self.out / "stream"

    @property
    def checkpoint(self) -> Path:
        """The folder of Spark's checkpoint."""
        return self.folder / "checkpoint"

    @property
    def state(self) -> Path:
        """The file with the state; replacing it commits a batch."""
        return self.folder / "state.json"

    @property
    def archive(self) -> Path:
        """The folder of the archived transitions."""
        return self.out / "transitions"


def _check(name: str, value: float, least: float, most: float = math.inf) -> None:
    if not least <= value <= most or math.isinf(value):
        allowed = f"a number of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"  # fmt: skip
        raise InvalidInput(name, "a number out of range", allowed)
