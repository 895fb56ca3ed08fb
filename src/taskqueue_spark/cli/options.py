"""What most commands of the pipeline can be told: where the journal is, which part of it, and where Spark runs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from taskqueue_cli.output import AsJson
from taskqueue_core.errors import ConfigurationError, InvalidInput

_AGO = re.compile(r"([0-9]{1,7})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_FROM, _ENGINE = "Where the journal is", "Where Spark runs"


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Where Spark runs."""

    master: str | None = None
    remote: str | None = None
    conf: dict[str, str] = {}
    as_json: bool = False

    @property
    def elsewhere(self) -> bool:
        """Whether Spark may work on other machines than this one."""
        named = (self.conf.get(f"spark.{name}") for name in ("master", "remote"))
        return any(
            not name.startswith("local") for name in (self.master, self.remote, *named) if name
        )


class PipelineOptions(Engine, frozen=True, kw_only=True):
    """And where the journal is."""

    backend: str | None = None
    journal: Path | None = None
    saved: Path | None = None
    out: Path | None = None
    since: datetime | None = None
    until: datetime | None = None
    keys: tuple[str, ...] = ()


def engine(
    *,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Spark master, for example spark://host:7077. Default: all cores of this machine.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Spark Connect server, for example sc://host:15002.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Spark setting, for example spark.driver.memory=4g; may be repeated.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> Engine:
    """Return what was told. Raises `InvalidInput` and `ConfigurationError`."""
    if master and remote:
        raise ConfigurationError("--master and --remote: both are set; allowed: one of them")
    return Engine(master=master, remote=remote, conf=_pairs(conf or []), as_json=as_json)


def options(
    *,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="Backend whose journal is read: redis, with its TASKQUEUE_REDIS_... settings. "
            "Default: TASKQUEUE_BACKEND.",
            rich_help_panel=_FROM,
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Journal file of a memory backend, or a folder of such files.",
            rich_help_panel=_FROM,
            show_default=False,
        ),
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Folder written by an earlier --out: a snapshot, or the archive of `stream`.",
            rich_help_panel=_FROM,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the transitions and the results, as Parquet. Default: they are not kept.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start time: 2026-11-30T12:00 (UTC by default), or 90m, 12h, 7d ago.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="End time, as for --since.", show_default=False),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key", metavar="KEY", help="Only this queue; may be repeated.", show_default=False
        ),
    ] = None,
    master: str | None = None,
    remote: str | None = None,
    conf: list[str] | None = None,
    as_json: bool = False,
) -> PipelineOptions:
    """Return what was told. Raises `InvalidInput` and `ConfigurationError`."""
    if sum(value is not None for value in (backend, journal, saved)) > 1:
        raise ConfigurationError(
            "--backend, --journal and --from: more than one is set; allowed: one"
        )
    base = engine(master=master, remote=remote, conf=conf, as_json=as_json)
    now = datetime.now(UTC)
    return PipelineOptions(
        **msgspec.structs.asdict(base),
        backend=backend,
        journal=journal,
        saved=saved,
        out=out,
        since=_parse_time("since", since, now),
        until=_parse_time("until", until, now),
        keys=tuple(keys or ()),
    )


def with_options(by: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `engine` or `options` behind its own; it gets what they told as first argument."""

    def given(command: Callable[..., None]) -> Callable[..., None]:
        shared, own = (
            _options(options, engine) if by is options else _options(engine),
            _options(command),
        )
        first = next(iter(own))
        own.pop(first)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            common = {name: values.pop(name) for name in shared}
            command(by(**common), **values)

        both = [*own.values(), *shared.values()]
        signature = inspect.Signature(sorted(both, key=lambda parameter: parameter.kind))
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
        del run.__wrapped__
        return run

    return given


def _options(*functions: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of functions by name, with their annotations; the last word is the last function's."""
    matches: dict[str, inspect.Parameter] = {}
    for function in functions:
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            matches[name] = parameter.replace(annotation=hints[name])
    return matches


def _pairs(names: list[str]) -> dict[str, str]:
    pairs = {}
    for text in names:
        name, sign, value = text.partition("=")
        if not (name and sign):
            raise InvalidInput("conf", f"text of length {len(text)}", "NAME=VALUE")
        pairs[name] = value
    return pairs


def _parse_time(field: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    if ago := _AGO.fullmatch(text):
        try:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        except OverflowError:
            return datetime.min.replace(tzinfo=UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        allowed = "a time, as 2026-11-30T12:00 or 2026-11-30T12:00:05Z, or 90m, 12h, 7d ago"
        raise InvalidInput(field, f"text of length {len(text)}", allowed) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
