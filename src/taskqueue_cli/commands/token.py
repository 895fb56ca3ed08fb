"""``taskqueue token``: create, list and revoke access tokens."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from taskqueue_cli.commands.status import format_time
from taskqueue_cli.output import (
    AsJson,
    argument,
    console,
    make_table,
    note,
    option,
    print_json,
)
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name

if TYPE_CHECKING:
    from taskqueue_server.auth.tokens import TokenEntry


_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Name = Annotated[str, argument("Name of the client that uses the token.", metavar="NAME")]
File = Annotated[
    Path | None, option("Path of the tokens file. Default: TASKQUEUE_TOKENS_FILE.", "--file")
]

_TEXT = "Create, list and revoke access tokens of a server."
token = typer.Typer(
    name="token",
    help=f"{_TEXT}\n\nThe tokens file contains only hashes. A server reads changes within two seconds.",
    short_help=_TEXT,
    no_args_is_help=True,
)


@token.command()
def new(
    name: Name,
    *,
    verbs: Annotated[
        str, option("Allowed actions, separated by commas: publish, consume, observe, admin.")
    ],
    keys: Annotated[
        str,
        option("Allowed queues, separated by commas: a key, 'mail-*' for a prefix, '*' for all."),
    ],
    expires: Annotated[
        str | None,
        option("Expiry: a duration such as 90d, 12h or 30m, or a date such as 2027-01-31."),
    ] = None,
    rate: Annotated[
        float | None,
        option(
            "Maximum number of requests and published tasks per second, for each server process."
        ),
    ] = None,
    burst: Annotated[
        float | None,
        option(
            "Maximum burst of requests and published tasks after an idle period. "
            "Default: the value of --rate, but at least 1."
        ),
    ] = None,
    connections: Annotated[
        int | None,
        option("Maximum number of open sockets, for each server process. Default: 2500."),
    ] = None,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it once; the file stores only its hash.

    A name can have several tokens. To replace a token, create a new one for the same name and distribute it.
    Then revoke the old one: taskqueue token revoke NAME --keep-newest
    """
    from taskqueue_server.auth import tokens, tokens_file  # noqa: PLC0415 - slow to import

    path, rights, patterns = _path(file), _split_list(verbs), _split_list(keys)
    check_name("name", name)
    if not rights or not set(rights).issubset(tokens.VERBS):
        raise InvalidInput(
            "verbs",
            f"text of length {len(verbs)} that is not a list of allowed actions",
            ", ".join(tokens.VERBS),
        )
    for pattern in patterns or [""]:
        tokens.check_pattern("keys", pattern)
    tokens.check_limits(rate, burst, connections)
    secret = tokens_file.new_token()
    entry = tokens_file.add(
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
    what = f"{' and '.join(sorted(entry.verbs))} on {', '.join(entry.keys)}{bounds}{until}"
    note(f"{name} ({entry.short}) may {what}. The token is not shown again:", "dim")
    typer.echo(secret)
    if file is not None and load_settings(Settings).tokens_file is None:
        note(f"Start the server with TASKQUEUE_TOKENS_FILE={path}", "dim")


@token.command(name="list")
def listing(*, file: File = None, as_json: AsJson = False) -> None:
    """List the tokens of a file with their permissions, limits and expiry."""
    from taskqueue_server.auth.tokens import Tokens  # noqa: PLC0415 - slow to import

    tokens = Tokens.load(path := _path(file)).entries
    if as_json:
        print_json([_as_dict(entry) for entry in tokens])
        return
    if not tokens:
        console.print(f"No tokens in {path}: the server rejects every client.", markup=False)
        return
    table = make_table("name", texts=("id", "verbs", "keys", "limits", "expires"))
    for entry in tokens:
        table.add_row(
            entry.name,
            entry.short,
            " ".join(sorted(entry.verbs)),
            " ".join(entry.keys),
            ", ".join(_limits(entry)),
            _format_expiry(entry),
        )
    console.print(table)


@token.command()
def revoke(
    name: Name,
    *,
    token_id: Annotated[str | None, option("Revoke only the token with this id.", "--id")] = None,
    keep_newest: Annotated[
        bool, typer.Option("--keep-newest", help="Revoke all tokens of the name except the newest.")
    ] = False,
    file: File = None,
    as_json: AsJson = False,
) -> None:
    """Revoke all or some tokens of a name. Within ten seconds, the server closes connections with revoked tokens."""
    from taskqueue_server.auth.tokens import Tokens  # noqa: PLC0415 - slow to import
    from taskqueue_server.auth.tokens_file import remove  # noqa: PLC0415 - slow to import

    path = _path(file)

    def of_name(entry: TokenEntry) -> bool:
        return entry.name == name and token_id in {None, entry.short}

    known = [entry for entry in Tokens.load(path).entries if of_name(entry)]
    if not known:
        names = sorted({entry.name for entry in Tokens.load(path).entries})
        allowed = ", ".join(names[:20]) or "none, because there are no tokens"
        raise InvalidInput("name", "a name or id that has no token", allowed)
    newest = known[-1] if keep_newest else None
    revoked = remove(path, lambda entry: of_name(entry) and entry != newest)
    if as_json:
        print_json({"revoked": [_as_dict(entry) for entry in revoked], "file": str(path)})
    else:
        ids = ", ".join(entry.short for entry in revoked)
        console.print(
            f"Tokens of [bold]{name}[/] revoked: {len(revoked)}" + (f" ({ids})." if ids else ".")
        )


def _path(given: Path | None) -> Path:
    path = given or load_settings(Settings).tokens_file
    if path is None:
        raise ConfigurationError(
            "the tokens file is not known: give --file, or set TASKQUEUE_TOKENS_FILE"
        )
    return path


def _split_list(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _expiry(text: str | None) -> float | None:
    from taskqueue_server.auth.tokens import seconds_of  # noqa: PLC0415 - slow to import

    if text is None:
        return None
    allowed = "a duration such as 90d, 12h or 30m, or a future date such as 2027-01-31"
    if match := _DURATION.fullmatch(text):
        return time.time() + int(match[1]) * _SECONDS[match[2]]
    try:
        at = seconds_of(float(text) if text.replace(".", "", 1).isdecimal() else text)
    except (ValueError, OverflowError):
        at = 0.0
    if at <= time.time():
        raise InvalidInput(
            "expires",
            f"text of length {len(text)} that is not a duration or a future date",
            allowed,
        )
    return at


def _limits(entry: TokenEntry) -> list[str]:
    texts = []
    if entry.rate is not None:
        burst = "" if entry.burst is None else f" (burst {entry.burst:g})"
        texts.append(f"{entry.rate:g} per second{burst}")
    if entry.connections is not None:
        texts.append(f"{entry.connections} socket{'' if entry.connections == 1 else 's'}")
    return texts


def _format_expiry(entry: TokenEntry) -> Text:
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
