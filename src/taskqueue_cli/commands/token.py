"""``taskqueue token``: who may use a server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from taskqueue_cli.commands.status import format_time
from taskqueue_cli.output import AsJson, console, note, print_json
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name

if TYPE_CHECKING:
    from taskqueue_server.auth.tokens import TokenEntry

__all__ = ["add_to"]

_SPAN = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.", show_default=False)]
File = Annotated[
    Path | None,
    typer.Option("--file", help="The tokens file. TASKQUEUE_TOKENS_FILE.", show_default=False),
]

_TEXT = "Make tokens that a server knows, list and revoke them."
token = typer.Typer(
    help=f"{_TEXT}\n\nThe file holds hashes. A server looks at it every two seconds, so no restart is needed.",
    short_help=_TEXT,
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(token, name="token")


@token.command()
def new(
    name: Name,
    *,
    verbs: Annotated[
        str,
        typer.Option(
            help="What it is for: publish, consume, admin, by commas.", show_default=False
        ),
    ],
    keys: Annotated[
        str,
        typer.Option(
            help="With which queues, by commas: a key, 'mail-*' for a beginning, '*' for all.",
            show_default=False,
        ),
    ],
    expires: Annotated[
        str | None,
        typer.Option(help="In 90d, 12h, 30m, or when: 2027-01-31.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="How many requests and published tasks a second, at each server process.",
            show_default=False,
        ),
    ] = None,
    burst: Annotated[
        float | None,
        typer.Option(
            help="How many of them at once after a pause. As many as in a second, unless given.",
            show_default=False,
        ),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(
            help="How many sockets at a time, at each server process.", show_default=False
        ),
    ] = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once; the file gets its hash.

    A name may have several: make the new one, give it to all, then revoke the old one with --keep-newest.
    """
    from taskqueue_server.auth.tokens import (  # noqa: PLC0415 - as in `serve`
        VERBS,
        check_limits,
        check_pattern,
    )
    from taskqueue_server.auth.tokens_file import add, new_token  # noqa: PLC0415 - as in `serve`

    path, rights, patterns = _path(file), _split_list(verbs), _split_list(keys)
    check_name("name", name)
    if not rights or not set(rights).issubset(VERBS):
        raise InvalidInput("verbs", f"text of length {len(verbs)}", ", ".join(VERBS))
    for pattern in patterns or [""]:
        check_pattern("keys", pattern)
    check_limits(rate, burst, connections)
    secret = new_token()
    entry = add(
        path,
        name,
        secret,
        verbs=rights,
        keys=patterns,
        at=_expiry(expires),
        rate=rate,
        burst=burst,
        connections=connections,
    )
    if as_json:
        print_json({"token": secret, **_as_dict(entry), "file": str(path)})
        return
    until = "" if entry.expires_at is None else f", until {format_time(entry.expires_at)}"
    bounds = "".join(f", {limit}" for limit in _limits(entry))
    what = f"{' and '.join(sorted(entry.verbs))} with {', '.join(entry.keys)}{bounds}{until}"
    note(f"{name} ({entry.short}) may {what}. This is the token; it is not shown again:", "dim")
    typer.echo(secret)
    if file is not None and load_settings(Settings).tokens_file is None:
        note(f"The server needs TASKQUEUE_TOKENS_FILE={path}", "dim")


@token.command(name="list")
def listing(*, file: File = None, as_json: AsJson = False) -> None:
    """List the tokens of a file: whose, for what, until when."""
    from taskqueue_server.auth.tokens_file import entries  # noqa: PLC0415 - as in `serve`

    matches = entries(path := _path(file))
    if as_json:
        print_json([_as_dict(entry) for entry in matches])
        return
    if not matches:
        console.print(f"No tokens in {path}: nobody gets in.", markup=False)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", overflow="fold")
    for title in ("id", "verbs", "keys", "limits", "expires"):
        table.add_column(title, overflow="fold")
    for entry in matches:
        table.add_row(
            entry.name,
            entry.short,
            " ".join(sorted(entry.verbs)),
            " ".join(entry.keys),
            ", ".join(_limits(entry)),
            _when(entry),
        )
    console.print(table)


@token.command()
def revoke(
    name: Name,
    *,
    which: Annotated[
        str | None, typer.Option("--id", help="Only this one of the name.", show_default=False)
    ] = None,
    keep_newest: Annotated[
        bool, typer.Option("--keep-newest", help="All of the name but the last one made.")
    ] = False,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Revoke all tokens of a name, or some of them. Connections that showed them end within ten seconds."""
    from taskqueue_server.auth.tokens_file import entries, remove  # noqa: PLC0415 - as in `serve`

    path = _path(file)

    def of_name(entry: TokenEntry) -> bool:
        return entry.name == name and which in {None, entry.short}

    known = [entry for entry in entries(path) if of_name(entry)]
    if not known:
        names = sorted({entry.name for entry in entries(path)})
        allowed = ", ".join(names[:20]) or "none: there are no tokens"
        raise InvalidInput("name", "a token that is not there", allowed)
    spared = known[-1] if keep_newest else None
    gone = remove(path, lambda entry: of_name(entry) and entry != spared)
    if as_json:
        print_json({"revoked": [_as_dict(entry) for entry in gone], "file": str(path)})
    else:
        ids = ", ".join(entry.short for entry in gone)
        console.print(f"Revoked {len(gone)} of [bold]{name}[/]" + (f" ({ids})." if ids else "."))


def _path(given: Path | None) -> Path:
    path = given or load_settings(Settings).tokens_file
    if path is None:
        raise ConfigurationError("which file? Say --file, or set TASKQUEUE_TOKENS_FILE")
    return path


def _split_list(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _expiry(text: str | None) -> float | None:
    from taskqueue_server.auth.tokens import seconds_of  # noqa: PLC0415 - as in `serve`

    if text is None:
        return None
    allowed = "a span such as 90d, 12h or 30m, or a time to come, such as 2027-01-31"
    if match := _SPAN.fullmatch(text):
        return time.time() + int(match[1]) * _SECONDS[match[2]]
    try:
        at = seconds_of(float(text) if text.replace(".", "", 1).isdecimal() else text)
    except (ValueError, OverflowError):
        at = 0.0
    if at <= time.time():
        raise InvalidInput("expires", f"text of length {len(text)}", allowed)
    return at


def _limits(entry: TokenEntry) -> list[str]:
    results = []
    if entry.rate is not None:
        at_once = "" if entry.burst is None else f" and {entry.burst:g} at once"
        results.append(f"{entry.rate:g} a second{at_once}")
    if entry.connections is not None:
        results.append(f"{entry.connections} socket{'' if entry.connections == 1 else 's'}")
    return results


def _when(entry: TokenEntry) -> Text:
    if entry.expires_at is None:
        return Text("never", "dim")
    return Text(format_time(entry.expires_at), "" if entry.lives(time.time()) else "red")


def _as_dict(entry: TokenEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "id": entry.short,
        "verbs": sorted(entry.verbs),
        "keys": list(entry.keys),
        "expires_at": entry.expires_at,
        "rate": entry.rate,
        "burst": entry.burst,
        "connections": entry.connections,
    }
