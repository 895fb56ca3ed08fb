"""Conversion of Prefect's task keys and client ids to valid names of queues and consumers, and back."""

from __future__ import annotations

import re
from hashlib import sha256

from taskqueue_core.limits import LIMITS

_INVALID = re.compile(r"[^A-Za-z0-9_<.:@=+>-]+|^[.:@=+>-]")
_ESCAPED = re.compile(r"((?:~[0-9a-f]{2})+)")
_ESCAPE_PREFIX = "<~."
"""prefix of a name that would otherwise be empty or begin with an escape sequence; escape sequences contain no dot"""
_CUT_MARK = "~-"
_DIGEST_LENGTH = 32
_CONNECTION_SEPARATOR = "~+"
"""separator between a client's id and the mark that distinguishes its connections"""
RECEIVER = "prefect-server"
"""client id in the names of the connections with which servers receive runs for their workers"""
_MARK_LENGTH = 10
"""maximum length of the mark that distinguishes a client's connections"""


def name_of(spelling: str, max_length: int = LIMITS.name) -> str:
    """Convert any text to a valid name, by escaping the characters that names must not contain.

    A name that would be too long is cut, and ends with a digest of the whole text.
    """
    name = _INVALID.sub(_escape, spelling)
    if not name or name.startswith("~"):
        name = _ESCAPE_PREFIX + name
    if len(name) <= max_length:
        return name
    digest = sha256(spelling.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return name[: max_length - len(_CUT_MARK) - _DIGEST_LENGTH] + _CUT_MARK + digest


def spelling_of(name: str) -> str:
    """Return the text that `name_of` converted to this name; only a part of it if the name was cut."""
    parts = _ESCAPED.split(name.removeprefix(_ESCAPE_PREFIX))
    escaped = (bytes.fromhex(part.replace("~", "")) for part in parts[1::2])
    parts[1::2] = [part.decode(errors="replace") for part in escaped]
    return "".join(parts)


def connection_of(client_id: str, mark: str) -> str:
    """Return a name for one connection of a client, with a unique ``mark`` of at most ten characters."""
    return (
        name_of(client_id, LIMITS.name - len(_CONNECTION_SEPARATOR) - _MARK_LENGTH)
        + _CONNECTION_SEPARATOR
        + mark
    )


def client_of(connection: str) -> str:
    """Return the client id in the name of a connection; only a part of it if the name was cut."""
    return spelling_of(connection.rpartition(_CONNECTION_SEPARATOR)[0] or connection)


def _escape(match: re.Match[str]) -> str:
    return "".join(f"~{byte:02x}" for byte in match[0].encode(errors="surrogatepass"))
