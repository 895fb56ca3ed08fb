"""The limits on names, payloads, headers and times: each limit is exact, and no error shows the refused value."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import (
    LIMITS,
    check_duration,
    check_headers,
    check_json,
    check_name,
    check_time,
    deepest,
    kind_of,
)

BAD_NAMES = [
    "",
    "a b",
    "x" * 10_000,
    "..",
    "../etc/passwd",
    "a/b",
    "a\\b",
    "*",
    "{a}{b}",
    "a\r\nb",
    "a\n",
    "a\x00",
    "-a",
    ":a",
    "a%00",
    "a,b",
    'a"b',
    "$a",
    "a\u200b",  # this string contains a zero-width space
    "\u202ea",  # this string starts with a right-to-left override
    "\ufeffa",  # this string starts with a byte order mark
    "\u0430",  # this is the Cyrillic letter that looks like a Latin "a"
    "pa\u0443pal",  # this string contains the Cyrillic letter that looks like a Latin "y"
    "e\u0301",  # this is "é" as two code points: a letter and a combining accent
    "\ud800",  # this is a lone surrogate, which UTF-8 cannot encode
    None,
    1,
    True,
    b"a",
    object(),
]
GOOD_NAMES = [
    "a",
    "0",
    "_",
    "images.resize",
    "my_module.my_task",
    "tasks:resize@v2",
    "a-b_c.d:e@f=g+h",
    "<lambda>",
    "module.<locals>.f",
    "a..b",
    "input:prediction:fp-" + "0" * 32,
    "x" * LIMITS.name,
]


def shown(value: object) -> str:
    """Return a test id for a value, without memory addresses, so that all test processes use the same ids."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.mark.parametrize("name", BAD_NAMES, ids=shown)
def test_bad_names(name: object) -> None:
    """Fault K2: a string that a store, a shell or a reader could misinterpret is not accepted as a name."""
    with pytest.raises(InvalidInput, match=r"^tenant: got ") as caught:
        check_name("tenant", name)
    assert caught.value.field == "tenant"


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(name: str) -> None:
    """Names of Python functions, modules and deployments are accepted as queue names."""
    check_name("key", name)


@given(st.text(max_size=300))
def test_names_are_plain(text: str) -> None:
    """Fault K2: any accepted name is short, printable ASCII without brackets, slashes or quotes."""
    try:
        check_name("key", text)
    except InvalidInput:
        return
    assert text.isascii()
    assert text.isprintable()
    assert 0 < len(text) <= LIMITS.name
    assert not set(text) & set("{}[]()/\\*?'\"`$%&|;, !#^")
    assert text[0].isalnum() or text[0] in "_<"


@pytest.mark.parametrize(
    ("check", "longest"),
    [
        (lambda n: check_name("f", "x" * n), LIMITS.name),
        (lambda n: check_json("f", b'"' + b"x" * (n - 2) + b'"', "payload"), LIMITS.payload),
        (lambda n: check_json("f", b" " * (n - 1) + b"1", "result"), LIMITS.result),
        (lambda n: check_json("f", b"[" * n + b"]" * n, "payload"), LIMITS.depth),
        (lambda n: check_json("f", b'{"a":' * n + b"1" + b"}" * n, "payload"), LIMITS.depth),
        (lambda n: check_headers("f", {f"h{i}": "" for i in range(n)}), LIMITS.headers),
        (lambda n: check_headers("f", {"h": "x" * (n - 1)}), LIMITS.header_bytes),
        (lambda n: check_headers("f", {"h" * 2: "é" * (n // 2 - 1)}), LIMITS.header_bytes),
    ],
    ids=[
        "name",
        "payload",
        "result",
        "arrays",
        "objects",
        "headers",
        "header bytes",
        "UTF-8 bytes",
    ],
)
def test_each_limit_is_exact(check: Callable[[int], None], longest: int) -> None:
    """Faults K2 and K3: a value exactly at the limit is accepted, and one above the limit is refused."""
    check(longest)
    with pytest.raises(InvalidInput, match=r"^f: got ") as caught:
        check(longest + 2 if longest == LIMITS.header_bytes else longest + 1)
    assert "xx" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"NaN",
        b"Infinity",
        b"{",
        b"[1,]",
        b"1 2",
        b"01",
        b'"a',
        b'"\n"',
        b'"\\x41"',
        b'"\\ud800"',
        b'"\\udc00 "',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'{"\xff":1}',
        b"\xef\xbb\xbf1",
        b"{1:2}",
        b"// note\n1",
        b"[" * 100_000,
        "{}",
        memoryview(b"{}"),
        None,
    ],
    ids=lambda text: shown(text)[:20],
)
def test_what_is_not_json(text: object) -> None:
    """Fault K3: any text that is not strict JSON is refused with the same kind of error."""
    with pytest.raises(InvalidInput, match=r"^payload: got "):
        check_json("payload", text, "payload")


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b" {} ",
        b"[]",
        b"-0.0",
        b"1e5",
        b"18446744073709551617",
        b'"\\ud83d\\ude00"',
        '"\U0001f600"'.encode(),
        b'"{[' + b"[{" * 200 + b'"',
        b'"' + b'\\"[' * 300 + b'"',
        b'"\\\\"',
        b"[" + b"[]," * 5000 + b"{}]",
        b'{"a":1,"a":2}',
    ],
    ids=lambda text: shown(text)[:20],
)
def test_what_is_json(text: bytes) -> None:
    """Valid JSON is accepted; brackets inside strings and brackets side by side do not add to the nesting depth."""
    check_json("payload", text, "payload")


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(value=nested, levels=st.integers(1, 2 * LIMITS.depth))
def test_depth_is_counted_exactly(value: object, levels: int) -> None:
    """Fault K3: a text is refused if and only if its arrays and objects are nested more deeply than the limit."""

    def depth(of: object) -> int:
        inner = list(of.values()) if isinstance(of, dict) else of
        return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0

    for level in range(levels):
        value = {"]": value} if level % 3 else [value, "["]
    text = json.dumps(value, ensure_ascii=False).encode()
    allowed = depth(value) <= LIMITS.depth
    try:
        check_json("payload", text, "payload")
    except InvalidInput:
        assert not allowed
    else:
        assert allowed


BAD_NUMBERS = [float("nan"), float("inf"), float("-inf"), -1, -1e-9, 10**400, True, "5", None, b"1"]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 253_402_300_800, 1e18], ids=lambda v: repr(v)[:12])
def test_bad_times(value: object) -> None:
    """Fault K4: a value that is not a finite number between the years 1970 and 10000 is refused as a time."""
    with pytest.raises(InvalidInput, match=r"^not_before: got "):
        check_time("not_before", value)


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 1e10], ids=lambda v: repr(v)[:12])
def test_bad_durations(value: object) -> None:
    """Fault K4: a duration must be a finite, non-negative number of seconds, at most about a century."""
    with pytest.raises(InvalidInput, match=r"^delay: got "):
        check_duration("delay", value)


@pytest.mark.parametrize("value", [0, 0.0, 1, 1_700_000_000.5, 253_402_300_799])
def test_good_times(value: float) -> None:
    """Times may be whole or fractional seconds, up to the last second of the year 9999."""
    check_time("deadline", value)
    check_duration("delay", min(value, 1e9))


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [],
        "a",
        {"a": 1},
        {1: "a"},
        {"a": None},
        {"a": "b\r\nc"},
        {"a\n": "b"},
        {"a": "\x00"},
        {"a": "\ud800"},
        {"a": b"b"},
        {"a": "\u202e"},
    ],
    ids=repr,
)
def test_bad_headers(headers: object) -> None:
    """Fault K2: header names and values must be printable text, so that they cannot forge headers or log lines."""
    with pytest.raises(InvalidInput, match=r"^headers: got "):
        check_headers("headers", headers)


@pytest.mark.parametrize(
    "check",
    [
        lambda secret: check_name("f", f"{secret}!"),
        lambda secret: check_name("f", secret * 30),
        lambda secret: check_json("f", f'"{secret}'.encode(), "payload"),
        lambda secret: check_json("f", secret, "payload"),
        lambda secret: check_time("f", secret),
        lambda secret: check_duration("f", secret),
        lambda secret: check_headers("f", {secret: 1}),
        lambda secret: check_headers("f", {"a": f"{secret}\n"}),
        lambda secret: check_headers("f", secret),
    ],
)
def test_no_error_shows_the_value(check: Callable[[str], None]) -> None:
    """No part of a refused value is in the error message, because the value may be a secret."""
    with pytest.raises(InvalidInput) as caught:
        check("hunter2-secret")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("ab", "str of length 2"), (b"a", "bytes of length 1"), ({}, "dict of length 0"), (1, "int")],
)
def test_kinds(value: object, kind: str) -> None:
    """``kind_of`` describes a value by its type and, if it has a length, its length."""
    assert kind_of(value) == kind


@pytest.mark.parametrize(
    ("check", "make"),
    [
        (lambda v: check_name("f", v), lambda n: "a" * n),
        (lambda v: check_name("f", v), lambda n: "a" * n + "\n"),
        (lambda v: check_name("f", v), lambda n: "{" * n),
        (lambda v: check_json("f", v, "body"), lambda n: b'"' + b"\\\\" * (n // 2)),
        (
            lambda v: check_json("f", v, "body"),
            lambda n: b'"' + b'\\"' * (n // 2) + b'"' + b"[" * 200,
        ),
        (
            lambda v: check_json("f", v, "body"),
            lambda n: (b"[" * 99 + b"]" * 99 + b",") * (n // 199),
        ),
        (lambda v: check_json("f", v, "body"), lambda n: b"[" + b"[[" * 101 + b'"",' * (n // 3)),
        (lambda v: check_json("f", v, "body"), lambda n: b"[" + b'{"a":[' * 40 + b"1" * n),
        (lambda v: check_headers("f", v), lambda n: {"a": "b" * n + "\n"}),
    ],
)
def test_checks_take_linear_time(check: Callable[[Any], None], make: Callable[[int], Any]) -> None:
    """Fault K2: the processor time of a check grows linearly with the input."""

    def fastest(value: Any) -> float:
        times = []
        for _ in range(5):
            start = time.thread_time()
            with pytest.raises(InvalidInput):
                check(value)
            times.append(time.thread_time() - start)
        return min(times)

    assert fastest(make(1_000_000)) <= 50 * max(fastest(make(100_000)), 1e-4)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param((b"[" * 98 + b"]" * 98) * 1300, id="deep"),
        pytest.param(b"[]" * 100_000, id="flat"),
        pytest.param(b"[" * 90 + b"[[][]]" * 30_000 + b"]" * 90, id="deep and flat"),
    ],
)
def test_depth_is_found_in_linear_time(text: bytes) -> None:
    """Fault K4: the depth of any text is found by reading it a few times, not once per level (Security 5)."""

    class Counted(bytes):
        read = 0

        def count(self, *args: Any) -> int:
            Counted.read += len(self)
            return super().count(*args)

        def replace(self, *args: Any) -> "Counted":
            return Counted(super().replace(*args))

    level = highest = 0
    for bracket in text:
        level += 1 if bracket == ord("[") else -1
        highest = max(highest, level)
    assert deepest(Counted(text)) == highest
    assert 0 < Counted.read < 10 * len(text)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a/b", "str of length 3 that contains '/'"),
        ("a\u202eb\x00", r"str of length 4 that contains '\u202e'"),
        ("-a", "str of length 2 that starts with '-'"),
        ("", "str of length 0"),
        ("/" * 201, "str of length 201"),
    ],
)
def test_the_wrong_character_of_a_name_is_named(name: str, fault: str) -> None:
    """Fault K4: the error about a name shows the first character that is not allowed, escaped, and nothing else."""
    with pytest.raises(InvalidInput) as caught:
        check_name("key", name)
    assert str(caught.value).startswith(f"key: got {fault}; allowed: ")
