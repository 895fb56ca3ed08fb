"""The AsyncAPI document describes every websocket frame completely and correctly."""

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
    """Return the part of the document to which a reference points."""
    found: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def schema_of(tag: str) -> dict[str, Any]:
    """Return the schema of a frame's payload, including the schemas to which it refers."""
    return {**MESSAGES[tag]["payload"], "components": DOCUMENT["components"]}


VALIDATORS = {tag: jsonschema_rs.Draft202012Validator(schema_of(tag)) for tag in MESSAGES}


def fits(value: Any) -> bool:
    """Return whether a frame is valid according to the document."""
    tag = value.get("type") if isinstance(value, dict) else None
    return isinstance(tag, str) and tag in VALIDATORS and VALIDATORS[tag].is_valid(value)


def references(value: Any) -> list[str]:
    """Return every reference in a part of the document."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [one for inner in value.values() for one in references(inner)]
    return [one for inner in value for one in references(inner)] if isinstance(value, list) else []


async def test_it_is_served(api: httpx2.AsyncClient) -> None:
    """E1: the server serves its AsyncAPI document, from which a client in any language can be generated."""
    answer = await api.get("/v1/asyncapi.json")
    told = answer.json()
    assert told["asyncapi"] == "3.1.0"
    expected = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    assert {**told, "info": 0} == {**expected, "info": 0}


def test_every_frame_is_there_and_every_reference_leads_somewhere() -> None:
    """The document contains every frame of both directions and no other, and all its references resolve."""
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
    """The examples in the document and in docs/protocol.md are valid according to the document."""
    shown = [one["payload"] for one in MESSAGES[tag]["examples"]]
    shown += [json.loads(t) for _, t in EXAMPLES if json.loads(t)["type"] == tag]
    assert len(shown) > 1
    for value in shown:
        VALIDATORS[tag].validate(value)


def test_close_codes_are_those_of_the_page() -> None:
    """The document and docs/protocol.md list the same close codes."""
    table = PAGE.partition("| close code |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {int(code) for row in rows for code in row.split("·")} == set(CLOSE_CODES)
    assert set(DOCUMENT["channels"]["socket"]["x-close-codes"]) == {str(c) for c in CLOSE_CODES}


class Described(Driver):
    """A session fuzzer that also validates each frame against the AsyncAPI document."""

    def data(self) -> str | bytes:
        """Return a message; if it decodes to a frame other than a hello, it must be valid according to the document.

        The session checks the names in a hello, which a schema cannot express.
        """
        text = super().data()
        with contextlib.suppress(ProtocolViolation, UnicodeEncodeError):
            frame = decode_client(text)
            if not isinstance(frame, frames.Hello):
                assert fits(json.loads(text)), text
        return text

    def check_text(self, text: str) -> None:
        """Check that a frame of the server is valid according to the document."""
        super().check_text(text)
        value = json.loads(text)
        VALIDATORS[value["type"]].validate(value)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_the_session_says_and_takes_fits(seed: int) -> None:
    """Under random input, the document covers every frame that the server sends or accepts from a worker."""
    driver = Described(seed)
    for _ in range(100):
        driver.step()


def test_what_a_server_says_seldom_fits() -> None:
    """Frames that the server sends without a request of a worker are valid according to the document."""
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
    st.sampled_from([-0.5, 0.25, 1.5]),  # a JSON schema cannot reject 1.0 as an integer
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
    """The session accepts a frame of a worker exactly if the frame is valid according to the document."""
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
