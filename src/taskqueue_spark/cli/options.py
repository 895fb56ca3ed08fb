"""Options that the pipeline's commands share: which journal and which part of it to read, and where Spark runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from taskqueue_cli.output import AsJson
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.times import RECENT, parse_moment


def option(metavar: str, text: str, *names: str, panel: str | None = None) -> Any:
    """Return an option that does not show its default in the help."""
    return typer.Option(
        *names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False
    )


_source = partial(option, panel="Where the journal is")
_engine = partial(option, panel="Where Spark runs")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for where Spark runs. Raises `InvalidInput` and `ConfigurationError`."""

    master: Annotated[
        str | None,
        _engine(
            "URL",
            "Spark master, for example spark://host:7077. Default: all cores of this machine.",
        ),
    ] = None
    remote: Annotated[
        str | None,
        _engine("URL", "Spark Connect server, for example sc://host:15002."),
    ] = None
    conf: Annotated[
        list[str] | None,
        _engine(
            "NAME=VALUE", "Spark setting, for example spark.driver.memory=4g; may be repeated."
        ),
    ] = None
    as_json: AsJson = False

    def __post_init__(self) -> None:
        if self.master and self.remote:
            raise ConfigurationError("--master and --remote: both are set; allowed: one of them")
        _ = self.spark_settings

    @cached_property
    def spark_settings(self) -> dict[str, str]:
        """The Spark settings given with ``--conf``, by name."""
        pairs = {}
        for text in self.conf or ():
            name, sign, value = text.partition("=")
            if not (name and sign):
                raise InvalidInput(
                    "conf",
                    f"text of length {len(text)} that does not begin with a name and '='",
                    "NAME=VALUE",
                )
            pairs[name] = value
        return pairs

    @property
    def distributed(self) -> bool:
        """Whether Spark may run on other machines."""
        named = (self.spark_settings.get(f"spark.{name}") for name in ("master", "remote"))
        urls = filter(None, (self.master, self.remote, *named))
        return any(not url.startswith("local") for url in urls)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(EngineOptions):
    """Options for where Spark runs and where the journal is. Raises `InvalidInput` and `ConfigurationError`."""

    backend: Annotated[
        str | None,
        _source(
            "NAME",
            "Backend whose journal is read, for example redis (TASKQUEUE_REDIS_...). Default: TASKQUEUE_BACKEND.",
        ),
    ] = None
    journal: Annotated[
        Path | None,
        _source("PATH", "Journal file of a memory backend, or a folder of such files."),
    ] = None
    saved: Annotated[
        Path | None,
        _source(
            "DIR",
            "Folder that an earlier command wrote with --out: a snapshot, or the archive of `stream`.",
            "--from",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "Folder for transitions and results, as Parquet. Default: ./taskqueue-report for `report`, else none.",
        ),
    ] = None
    since: Annotated[
        str | None,
        option("TIME", f"Start time: {RECENT}."),
    ] = None
    until: Annotated[str | None, option("TIME", "End time, in the same form as --since.")] = None
    keys: Annotated[
        list[str] | None, option("KEY", "Limit the result to this queue; may be repeated.", "--key")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(value is not None for value in (self.backend, self.journal, self.saved)) > 1:
            raise ConfigurationError(
                "--backend, --journal and --from: more than one is set; allowed: only one"
            )
        _ = self.start, self.end

    @cached_property
    def start(self) -> datetime | None:
        """The time of the option ``--since``; ``None`` if it is not set."""
        return _parse_time("since", self.since)

    @cached_property
    def end(self) -> datetime | None:
        """The time of the option ``--until``; ``None`` if it is not set."""
        return _parse_time("until", self.until)


def _parse_time(field: str, text: str | None) -> datetime | None:
    return None if text is None else parse_moment(field, text, time.time())
