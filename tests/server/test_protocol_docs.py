"""docs/protocol.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_server.context import connections
from taskqueue_server.worker_socket.admission import HELLO_SECONDS

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json (\w+)\n(.*?)\n```", PAGE, re.DOTALL)
DECODE = {"worker": frames.decode_client, "server": frames.decode_server}
UNIONS = {"worker": frames.ClientFrame, "server": frames.ServerFrame}


@pytest.mark.parametrize(("side", "text"), EXAMPLES, ids=lambda value: value[:40])
def test_every_example_is_a_frame(side: str, text: str) -> None:
    """Each example on the page decodes as a frame of its direction, and has no unknown field."""
    frame = DECODE[side](text)
    again = DECODE[side](frames.encode(frame))
    assert again == frame
    known = {"type", *frame.__struct_fields__}
    assert set(msgspec.json.decode(text)) <= known
    if isinstance(frame, frames.Deliver):
        (told,) = msgspec.json.decode(text)["deliveries"]
        assert set(told) <= set(frames.WireDelivery.__struct_fields__)
        assert set(told["task"]) <= set(frames.WireTask.__struct_fields__)


@pytest.mark.parametrize("side", ["worker", "server"])
def test_every_frame_has_an_example(side: str) -> None:
    """The page has an example of every frame."""
    shown = {type(DECODE[side](text)) for told, text in EXAMPLES if told == side}
    assert shown == set(get_args(UNIONS[side]))
    assert PAGE.count("```json") == len(EXAMPLES)


def test_the_examples_make_a_conversation() -> None:
    """The first example of a worker on the page starts a session on the server."""
    session = ServerSession()
    first = next(text for side, text in EXAMPLES if side == "worker")
    session.feed(first)
    session.welcome("c", 15.0, "1")
    assert session.credit == 2


def test_codes_and_limits_are_those_of_the_code() -> None:
    """The tables on the page contain every close code, and each limit with its value."""
    meanings = {
        "CLOSE_CLEAN": "after your `bye`",
        "CLOSE_RESTART": "the server is shutting down",
        "CLOSE_TRY_LATER": "too many connections",
        "CLOSE_REVOKED": "the token was revoked",
        "CLOSE_PROTOCOL": "a protocol violation",
        "CLOSE_UNAUTHENTICATED": "the token",
        "CLOSE_TIMEOUT": "no hello in time",
    }
    assert set(meanings) == {name for name in vars(frames) if name.startswith("CLOSE_")}
    for name, meaning in meanings.items():
        row = rf"^\| {getattr(frames, name)} \| {meaning}"
        assert re.search(row, PAGE, re.MULTILINE), name
    numbers = {
        "a frame": LIMITS.frame,
        "a task's payload": LIMITS.payload,
        "keys of a hello": LIMITS.keys,
        "receipts of one": LIMITS.batch,
        "credit and held": LIMITS.credit,
        "tasks that you hold": LIMITS.held,
        "a key, id": LIMITS.name,
        "an error, reason": LIMITS.text,
        "sockets without a hello": connections.MAX_STRANGERS,
    }
    for what, number in numbers.items():
        assert re.search(rf"^\| {re.escape(what)}.*\b{number}\b", PAGE, re.MULTILINE), what
    assert LIMITS.result == LIMITS.payload
    assert f"{connections.MAX_STRANGERS} · {connections.MAX_CONNECTIONS} per server" in PAGE
    assert f"within {HELLO_SECONDS:g} seconds" in PAGE
