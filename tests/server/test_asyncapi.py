"""The AsyncAPI document is complete, and true of every frame."""

from __future__ import annotations

import contextlib
import json
from typing import Any, get_args

import httpx2
import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.protocol import frames
from taskqueue_core.protocol.frames import decode_client
from taskqueue_core.protocol.server_session import SendFrames, ServerSession
from taskqueue_server.worker_socket.asyncapi import CLOSE_CODES, document
from tests.server.sessions import delivery, ready
from tests.server.test_protocol_docs import EXAMPLES, PAGE
from tests.server.test_session_fuzz import Driver

DOCUMENT = document("1")
MESSAGES: dict[str, dict[str, Any]] = DOCUMENT["components"]["messages"]


def resolve(reference: str) -> Any:
    """What a reference leads to."""
    found: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def schema_of(tag: str) -> dict[str, Any]:
    """The schema of a frame's payload, which brings along what it refers to."""
    return {**MESSAGES[tag]["payload"], "components": DOCUMENT["components"]}


VALIDATORS = {tag: jsonschema_rs.Draft202012Validator(schema_of(tag)) for tag in MESSAGES}


def fits(value: Any) -> bool:
    """Whether the document has a frame like this."""
    tag = value.get("type") if isinstance(value, dict) else None
    return isinstance(tag, str) and tag in VALIDATORS and VALIDATORS[tag].is_valid(value)


def references(value: Any) -> list[str]:
    """Every reference in it."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []


async def test_it_is_served(api: httpx2.AsyncClient) -> None:
    """E1: any language can be generated from what the server itself tells."""
    answer = await api.get("/v1/asyncapi.json")
    told = answer.json()
    assert told["asyncapi"] == "3.1.0"
    assert {**told, "info": 0} == {**DOCUMENT, "info": 0}


def test_every_frame_is_there_and_every_reference_leads_somewhere() -> None:
    """No frame is left out, in either direction, and none is made up."""
    directions = {"receive": frames.ClientFrame, "send": frames.ServerFrame}
    for action, union in directions.items():
        told = {
            resolve(one["messages"][0]["$ref"])["$ref"].rpartition("/")[2]
            for one in DOCUMENT["operations"].values()
            if one["action"] == action
        }
        assert told == {kind.__struct_config__.tag for kind in get_args(union)}
    assert set(DOCUMENT["channels"]["socket"]["messages"]) == set(MESSAGES)
    for reference in references(DOCUMENT):
        assert resolve(reference)


@pytest.mark.parametrize("tag", MESSAGES)
def test_examples_fit(tag: str) -> None:
    """Those of the document, and those of the page about the protocol."""
    shown = [one["payload"] for one in MESSAGES[tag]["examples"]]
    shown += [json.loads(t) for _, t in EXAMPLES if json.loads(t)["type"] == tag]
    assert len(shown) > 1
    for value in shown:
        VALIDATORS[tag].validate(value)


def test_close_codes_are_those_of_the_page() -> None:
    """Each close code of the page is in the document, and the other way round."""
    table = PAGE.partition("| close code |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {int(code) for row in rows for code in row.split("·")} == set(CLOSE_CODES)
    assert set(DOCUMENT["channels"]["socket"]["x-close-codes"]) == {str(c) for c in CLOSE_CODES}


class Described(Driver):
    """Holds what is said against the document too."""

    def data(self) -> str | bytes:
        """What the decoder takes is described, but for the names in a hello, which the session checks."""
        text = super().data()
        with contextlib.suppress(ProtocolViolation, UnicodeEncodeError):
            frame = decode_client(text)
            if not isinstance(frame, frames.Hello):
                assert fits(json.loads(text)), text
        return text

    def check_text(self, text: str) -> None:
        """What the server says is described."""
        super().check_text(text)
        value = json.loads(text)
        VALIDATORS[value["type"]].validate(value)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_the_session_says_and_takes_fits(seed: int) -> None:
    """Whatever comes: a frame that the server sends fits, and so does each one of a worker that it takes."""
    driver = Described(seed)
    for _ in range(100):
        driver.step()


def test_what_a_server_says_seldom_fits() -> None:
    """Frames that no worker provokes."""
    session = ready(5, "r1", "r2")
    texts = [text for text, _ in session.deliver([delivery("r3", b'{"a":1}')])]
    texts += session.degraded(ok=False, reason="x") + session.ping() + session.revoke(["r2"])
    texts += session.settled({"r1": True, "r3": False}) + session.drain(1.5)
    assert len(texts) == 6
    for text in texts:
        VALIDATORS[json.loads(text)["type"]].validate(json.loads(text))


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10_002),
    st.sampled_from([-0.5, 0.25, 1.5]),  # that 1.0 is no integer here is beyond a schema
    st.sampled_from(["", "a", "k", "é", "x" * 200, "x" * 201, "a b", "-a", "{k}"]),
)
_VALUES = st.one_of(_LEAVES, st.lists(_LEAVES, max_size=3), st.dictionaries(st.just("r"), _LEAVES))
_OF_WORKERS = [json.loads(text) for side, text in EXAMPLES if side == "worker"]


@settings(max_examples=300, deadline=None)
@given(
    frame=st.sampled_from(_OF_WORKERS),
    changes=st.dictionaries(st.integers(0, 8), _VALUES, max_size=2),
    gone=st.integers(0, 40),
)
def test_the_server_takes_exactly_what_fits(
    frame: dict[str, Any], changes: dict[int, Any], gone: int
) -> None:
    """A worker that is written by the document is never told that its frame is invalid, and the other way round."""
    names = [name for name in frame if name != "type"]
    changed = dict(frame)
    for number, value in changes.items():
        if names:
            changed[names[number % len(names)]] = value
    if gone < len(names):
        del changed[names[gone]]
    session = ServerSession() if frame["type"] == "hello" else ready(10)
    said = [
        json.loads(event.text)
        for event in session.feed(msgspec.json.encode(changed).decode())
        if isinstance(event, SendFrames)
    ]
    refused = {"invalid_frame", "unsupported_protocol"} & {one.get("code") for one in said}
    assert fits(changed) == (not refused), (changed, said)
