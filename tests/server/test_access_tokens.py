"""The tokens file: its format and limits, its permissions, and how a token is found in it."""

from __future__ import annotations

import ast
import hmac
import inspect
import os
import stat
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_server.auth import tokens as module
from taskqueue_server.auth.tokens import Tokens, hashed, signature
from taskqueue_server.auth.tokens_file import add, remove
from tests.server.access import entry, write

SECRET = "tq_0123456789"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the token file."""
    return tmp_path / "tokens.toml"


class TestFinding:
    """How a token is matched to an identity."""

    def test_scopes(self, path: Path) -> None:
        """Security 2: a token grants each of its verbs on each of its keys; a key pattern may end in one star."""
        write(path, entry(SECRET, "mail", ["publish"], ["mail-*", "x"]))
        found = Tokens.load(path).identify(SECRET, time.time())
        assert found is not None
        assert found.name == "mail"
        assert found.is_allowed("publish", "mail-7")
        assert found.is_allowed("publish", "x")
        assert not found.is_allowed("publish", "xy")
        assert not found.is_allowed("publish", "mai")
        assert not found.is_allowed("publish")
        assert not found.is_allowed("admin", "x")

    def test_rotation(self, path: Path) -> None:
        """Security 6: two tokens of one name can be valid at the same time, until one expires or is removed."""
        soon = time.time() + 1000
        write(path, entry("old", "n", expires_at=soon), entry("new", "n"))
        both = Tokens.load(path)
        assert both.identify("old", soon - 1)
        assert both.identify("new", soon - 1)
        assert both.identify("old", soon) is None
        assert both.identify("new", soon)

    @pytest.mark.parametrize("shown", [None, "", "x", SECRET + "x", SECRET[:-1], "x" * 5000])
    def test_tokens_that_match_no_identity(self, path: Path, shown: str | None) -> None:
        """Fault K1: a missing, wrong, partial or too long token matches no identity.

        The hash of a token does not match either.
        """
        tokens = Tokens.load(write(path, entry(SECRET)))
        assert tokens.identify(shown, 0.0) is None
        assert tokens.identify(hashed(SECRET).hex(), 0.0) is None
        assert tokens.identify(SECRET, 0.0)

    def test_an_empty_file_admits_no_token(self, path: Path) -> None:
        """An empty token file admits no token."""
        assert Tokens.load(write(path)).identify(SECRET, 0.0) is None

    @pytest.mark.parametrize("place", [0, 7, 15, None])
    def test_every_entry_is_compared(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, place: int | None
    ) -> None:
        """Security 1: all hashes are compared, each in constant time, whichever entry matches."""
        compared: list[int] = []
        really = hmac.compare_digest

        def compare(one: bytes, other: bytes) -> bool:
            compared.append(len(one) + len(other))
            return really(one, other)

        rows = [entry(f"t{i}", f"n{i}") for i in range(16)]
        tokens = Tokens.load(write(path, *rows))
        monkeypatch.setattr(hmac, "compare_digest", compare)
        found = tokens.identify("zz" if place is None else f"t{place}", 0.0)
        assert compared == [64] * 16
        assert (found and found.name) == (None if place is None else f"n{place}")

    def test_nothing_ends_the_comparison(self) -> None:
        """Security 1: the comparison is one loop over all entries, without return, break or another comparison."""
        source = textwrap.dedent(inspect.getsource(Tokens.identify))
        (function,) = ast.parse(source).body
        (loop,) = (node for node in ast.walk(function) if isinstance(node, ast.For))
        assert not [
            n for n in ast.walk(loop) if isinstance(n, ast.Return | ast.Break | ast.Compare)
        ]
        assert "compare_digest(entry.sha256, shown)" in ast.unparse(loop)

    def test_reprs(self, path: Path) -> None:
        """Security 24: no repr contains a token or its hash."""
        tokens = Tokens.load(write(path, entry(SECRET)))
        for thing in (tokens, tokens.entries, tokens.identify(SECRET, 0.0), vars(tokens)):
            assert SECRET not in repr(thing)
            assert hashed(SECRET).hex() not in repr(thing)
            assert repr(hashed(SECRET))[2:-1] not in repr(thing)


class TestExpiry:
    """How the expiry time of a token is written."""

    @pytest.mark.parametrize(
        "line",
        [
            "1893456000",
            "1893456000.0",
            '"2030-01-01"',
            '"2030-01-01T00:00:00Z"',
            '"2030-01-01T02:00:00+02:00"',
            "2030-01-01",
            "2030-01-01T00:00:00",
            "2030-01-01T00:00:00Z",
        ],
    )
    def test_forms(self, path: Path, line: str) -> None:
        """An expiry is a number of seconds or a time, as text or as a TOML time, and in UTC unless it has an offset."""
        write(path, entry(SECRET))
        path.write_text(path.read_text(encoding="utf-8") + f"expires_at = {line}\n", "utf-8")
        (found,) = Tokens.load(path).entries
        assert found.expires_at == 1_893_456_000


class TestFile:
    """Which token files are refused, and what the error says."""

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"name": ""}, "token 2: name"),
            ({"name": "a b"}, "token 2: name"),
            ({"sha256": SECRET}, "token 2 (two): sha256"),
            ({"sha256": "ab"}, "token 2 (two): sha256"),
            ({"verbs": []}, "token 2 (two): verbs"),
            ({"verbs": "admin"}, "token 2 (two): verbs"),
            ({"verbs": ["root"]}, "token 2 (two): verbs"),
            ({"verbs": [["admin"]]}, "token 2 (two): verbs"),
            ({"keys": []}, "token 2 (two): keys"),
            ({"keys": ["*a"]}, "token 2 (two): keys"),
            ({"keys": ["a*b"]}, "token 2 (two): keys"),
            ({"keys": ["a**"]}, "token 2 (two): keys"),
            ({"keys": [3]}, "token 2 (two): keys"),
            ({"keys": ["a{b}"]}, "token 2 (two): keys"),
            ({"expires_at": "soon"}, "token 2 (two): expires_at"),
            ({"expires_at": -1}, "token 2 (two): expires_at"),
            ({"expires_at": True}, "token 2 (two): expires_at"),
            ({"verb": ["admin"]}, "token 2 (two): 'verb'"),
            ({"rate": 0}, "token 2 (two): rate"),
            ({"rate": True}, "token 2 (two): rate"),
            ({"rate": 1_000_001}, "token 2 (two): rate"),
            ({"burst": 5}, "token 2 (two): burst"),
            ({"rate": 5, "burst": 0.5}, "token 2 (two): burst"),
            ({"connections": 0}, "token 2 (two): connections"),
            ({"connections": 1.5}, "token 2 (two): connections"),
        ],
    )
    def test_wrong_entries(self, path: Path, change: dict[str, Any], field: str) -> None:
        """Security 25: the error names the entry and the field, and shows neither a hash nor the wrong value."""
        write(path, entry("first"), entry("second", "two") | change)
        with pytest.raises(ConfigurationError) as caught:
            Tokens.load(path)
        assert f"{path}: {field}" in str(caught.value)
        assert SECRET not in str(caught.value)
        assert hashed("second").hex() not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (b"[[token]", "not TOML"),
            (b"\xff", "not UTF-8"),
            (b"[token]\nname='n'", "[[token]] tables only"),
            (b"token = [1]", "[[token]] tables only"),
            (b"tokens = []", "[[token]] tables only"),
            (b"[[token]]\nname='n'", "sha256"),
        ],
    )
    def test_wrong_files(self, path: Path, text: bytes, told: str) -> None:
        """A file that is not a valid list of tokens is refused as a whole."""
        write(path)
        path.write_bytes(text)
        with pytest.raises(ConfigurationError) as caught:
            Tokens.load(path)
        assert told in str(caught.value)

    def test_limits(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Security 12: the number of entries is limited, and one token cannot be in two entries."""
        monkeypatch.setattr(module, "MAX_ENTRIES", 2)
        assert len(Tokens.load(write(path, entry("a"), entry("b"))).entries) == 2
        with pytest.raises(ConfigurationError, match="more than 2"):
            Tokens.load(write(path, entry("a"), entry("b"), entry("c")))
        with pytest.raises(ConfigurationError, match="same hash"):
            Tokens.load(write(path, entry("a", "one"), entry("a", "two")))

    @pytest.mark.parametrize("mode", [0o620, 0o604, 0o602, 0o660, 0o644])
    def test_others_may_not_use_it(self, path: Path, mode: int) -> None:
        """Security 26: a token file is refused if other users may read or write it.

        A user who can write the file could add a token.
        """
        write(path, entry(SECRET)).chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            Tokens.load(path)

    @pytest.mark.parametrize(
        ("mode", "owner", "us", "refused"),
        [
            (0o440, 0, 1000, False),
            (0o640, 0, 1000, False),
            (0o660, 0, 1000, True),
            (0o444, 0, 1000, True),
            (0o440, 1000, 1000, True),
            (0o640, 0, 0, False),
            (0o660, 0, 0, True),
            (0o400, 1000, 1000, False),
        ],
    )
    def test_as_kubernetes_mounts_it(
        self, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, us: int, *, refused: bool
    ) -> None:
        """Security 26: a file of root may be readable by its group, as Kubernetes mounts it.

        Any other file must be accessible to its owner only.
        """
        monkeypatch.setattr(os, "geteuid", lambda: us)
        found = os.stat_result((mode, 1, 1, 1, owner, 0, 1, 0, 0, 0))
        assert module._is_open(found) is refused

    def test_a_pipe_is_not_waited_for(self, path: Path) -> None:
        """A pipe in place of the token file is refused at once, because reading it could block forever."""
        os.mkfifo(path, 0o600)
        with pytest.raises(ConfigurationError, match="not a regular file"):
            Tokens.load(path)

    def test_its_owner_keeps_it(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Security 6: after root has revoked a token, the server's user still owns the file and can read it."""
        add(path, "n", SECRET, verbs=["publish"], keys=["*"])
        path.chmod(0o400)
        given: list[tuple[int, int]] = []
        really = Path.stat

        def others(file: Path, **options: Any) -> os.stat_result:
            found = really(file, **options)
            return os.stat_result((*found[:4], 10001, 10002, *found[6:])) if file == path else found

        monkeypatch.setattr(Path, "stat", others)
        monkeypatch.setattr(os, "fchown", lambda _, user, group: given.append((user, group)))
        assert remove(path, lambda _: True)
        assert given == [(10001, 10002)]
        assert stat.S_IMODE(really(path).st_mode) == 0o400

    def test_missing_and_no_file(self, path: Path) -> None:
        """A missing file is an error with a reason and without a stack trace."""
        assert signature(path) is None
        with pytest.raises(ConfigurationError, match="No such file"):
            Tokens.load(path)
        with pytest.raises(ConfigurationError, match="directory"):
            Tokens.load(path.parent)

    def test_a_change_shows(self, path: Path) -> None:
        """A replaced file is recognised as changed, even if its size and modification time are the same."""
        write(path, entry("a"))
        first = signature(path)
        stamp = path.stat()
        write(path, entry("b"))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert signature(path) != first
