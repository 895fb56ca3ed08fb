"""The command ``taskqueue token``, which creates, lists and revokes tokens."""

import hashlib
import os
import re
import stat
import threading
import time
import tomllib
from pathlib import Path

import pytest

from taskqueue_server.auth.tokens import Tokens
from taskqueue_server.auth.tokens_file import add, new_token, remove
from tests.cli.conftest import Cli

MAIL = ("--verbs", "publish,consume", "--keys", "mail-*, x")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the token file in the settings; the file does not exist yet."""
    found = tmp_path / "tokens.toml"
    monkeypatch.setenv("TASKQUEUE_TOKENS_FILE", str(found))
    return found


def test_a_new_token(cli: Cli, path: Path) -> None:
    """Security 1: a new token has 32 random bytes, and the file contains only its hash.

    Stdout contains the token and nothing else.
    """
    done = cli("token", "new", "mail", *MAIL)
    assert done.code == 0
    (secret,) = done.out.splitlines()
    assert re.fullmatch(r"tq_[A-Za-z0-9_-]{43}", secret)
    assert secret not in done.err
    assert "consume and publish on mail-*, x" in done.err
    text = path.read_text()
    assert secret not in text
    assert hashlib.sha256(secret.encode()).hexdigest() in text
    found = Tokens.load(path).identify(secret, time.time())
    assert found is not None
    assert found.is_allowed("consume", "mail-7")
    assert not found.is_allowed("admin", "mail-7")
    assert cli("token", "new", "mail", *MAIL).out.strip() != secret


def test_only_for_its_owner(cli: Cli, path: Path) -> None:
    """Security 26: the token file has mode 0600 whatever the umask, and no temporary file remains.

    A file that others can read is not changed.
    """
    old = os.umask(0)
    try:
        cli("token", "new", "mail", *MAIL)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    done = cli("token", "new", "mail", *MAIL)
    assert done.code == 2
    assert "chmod 600" in done.err


def test_json(cli: Cli, path: Path) -> None:
    """With --json, each command prints one JSON value."""
    made = cli("token", "new", "mail", *MAIL, "--expires", "2030-01-01", "--json").json
    assert made.pop("token").startswith("tq_")
    assert made.pop("file") == str(path)
    assert made == {
        "name": "mail",
        "id": made["id"],
        "verbs": ["consume", "publish"],
        "keys": ["mail-*", "x"],
        "expires_at": 1893456000.0,
        "rate": None,
        "burst": None,
        "connections": None,
    }
    assert cli("token", "list", "--json").json == [made]
    assert cli("token", "revoke", "mail", "--json").json == {"revoked": [made], "file": str(path)}
    assert cli("token", "list", "--json").json == []


def test_rotation(cli: Cli, path: Path) -> None:
    """Security 6: a second token with the same name can be added, and then the first one revoked.

    Other entries and comments in the file stay unchanged.
    """
    cli("token", "new", "other", *MAIL)
    path.write_text(path.read_text() + "# a remark\n")
    first = cli("token", "new", "mail", *MAIL).out.strip()
    second = cli("token", "new", "mail", *MAIL).out.strip()
    both = Tokens.load(path)
    assert both.identify(first, 0)
    assert both.identify(second, 0)
    assert "Tokens of mail revoked: 1" in cli("token", "revoke", "mail", "--keep-newest").out
    left = Tokens.load(path)
    assert left.identify(first, 0) is None
    assert left.identify(second, 0)
    assert [entry.name for entry in left.entries] == ["other", "mail"]
    assert "# a remark" in path.read_text()
    assert "revoked: 0" in cli("token", "revoke", "mail", "--keep-newest").out


def test_one_of_a_name(cli: Cli, path: Path) -> None:
    """An id selects one of several tokens with the same name."""
    ids = [cli("token", "new", "mail", *MAIL, "--json").json["id"] for _ in range(3)]
    cli("token", "revoke", "mail", "--id", ids[1])
    assert [entry.short for entry in Tokens.load(path).entries] == [ids[0], ids[2]]


def test_the_list(cli: Cli, path: Path) -> None:
    """The list shows name, id, verbs, keys and expiry of each token, and no hash."""
    cli("token", "new", "a", *MAIL)
    cli("token", "revoke", "a")
    assert "the server rejects every client" in cli("token", "list").out
    cli("token", "new", "mail", *MAIL, "--expires", "90d")
    out = cli("token", "list").out
    (entry,) = Tokens.load(path).entries
    assert entry.expires_at == pytest.approx(time.time() + 90 * 86400, abs=5)
    for word in ("mail", entry.short, "consume publish", "mail-* x"):
        assert word in out
    assert entry.sha256.hex() not in out


def test_limits(cli: Cli, path: Path) -> None:
    """Security 22: the rate and socket limits of a token are stored in the file and shown by the commands."""
    done = cli(
        "token", "new", "mail", *MAIL, "--rate", "50", "--burst", "200", "--connections", "1"
    )
    assert "50 per second (burst 200), 1 socket" in done.err
    found = Tokens.load(path).identify(done.out.strip(), time.time())
    assert found is not None
    assert (found.rate, found.burst, found.connections) == (50, 200, 1)
    told = cli("token", "new", "slow", *MAIL, "--rate", "0.5", "--json").json
    assert (told["rate"], told["burst"], told["connections"]) == (0.5, None, None)
    assert "0.5" in " ".join(cli("token", "list").out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("new", "a b", *MAIL), "name: "),
        (
            ("new", "a", "--verbs", "publish,root", "--keys", "*"),
            "publish, consume, observe, admin",
        ),
        (("new", "a", "--verbs", ",", "--keys", "*"), "publish, consume, observe, admin"),
        (("new", "a", "--verbs", "admin", "--keys", "a*b"), "prefixes followed by"),
        (("new", "a", *MAIL, "--rate", "0"), "rate: "),
        (("new", "a", *MAIL, "--burst", "5"), "burst: "),
        (("new", "a", *MAIL, "--connections", "0"), "connections: "),
        (("new", "a", "--verbs", "admin", "--keys", ""), "prefixes followed by"),
        (("new", "a", *MAIL, "--expires", "soon"), "90d"),
        (("new", "a", *MAIL, "--expires", "2001-01-01"), "a future date"),
        (("new", "a", "--keys", "*"), "--verbs"),
        (("list",), "No such file"),
        (("revoke", "a"), "No such file"),
    ],
)
def test_what_is_wrong(cli: Cli, path: Path, words: tuple[str, ...], told: str) -> None:
    """A wrong option exits with 2 and a reason, and creates no file."""
    done = cli("token", *words)
    assert done.code == 2
    assert told in done.err
    assert not path.exists()


def test_an_unknown_name(cli: Cli, path: Path) -> None:
    """Revoking an unknown name is an error that lists the existing names."""
    cli("token", "new", "mail", *MAIL)
    done = cli("token", "revoke", "male")
    assert done.code == 2
    assert "mail" in done.err
    assert len(Tokens.load(path).entries) == 1


def test_no_file_is_named(cli: Cli, tmp_path: Path) -> None:
    """Without a configured token file, the error says how to configure one.

    With --file, the command reminds that the server must be configured, too.
    """
    done = cli("token", "list")
    assert done.code == 2
    assert "TASKQUEUE_TOKENS_FILE" in done.err
    file = tmp_path / "t.toml"
    done = cli("token", "new", "mail", *MAIL, "--file", str(file))
    assert f"TASKQUEUE_TOKENS_FILE={file}" in done.err
    missing = tmp_path / "no" / "t.toml"
    assert "could not be changed" in cli("token", "new", "a", *MAIL, "--file", str(missing)).err


def test_side_by_side(path: Path) -> None:
    """Concurrent changes of the token file by several writers lose no entry."""

    def some(number: int) -> None:
        for turn in range(5):
            add(path, f"n{number}", new_token(), verbs=["admin"], keys=["*"])
            if turn % 2:
                remove(path, lambda entry: entry.name == f"n{number}")

    threads = [threading.Thread(target=some, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.name for entry in Tokens.load(path).entries) == [f"n{i}" for i in range(6)]


def test_written_otherwise(path: Path) -> None:
    """A token in a TOML form that the command cannot edit safely is left alone, with an error."""
    digest = hashlib.sha256(b"x").hexdigest()
    row = f'{{name = "a", sha256 = "{digest}", verbs = ["admin"], keys = ["*"]}}'
    path.touch(0o600)
    path.write_text(f"token = [{row}]\n")
    with pytest.raises(Exception, match="by hand"):
        remove(path, lambda _: True)
    assert tomllib.loads(path.read_text())["token"]
