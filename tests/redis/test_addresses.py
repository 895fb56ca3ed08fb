"""Redis URLs and settings: the accepted forms, the refused ones, and that no error shows a secret."""

from __future__ import annotations

import ssl
from pathlib import Path
from traceback import TracebackException
from typing import Any

import pytest
import trustme

from taskqueue_core.config import load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import HostAddress, Kind, StoreAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.connector import Connector

SECRET = "canary-5up3r"


def settings(**values: Any) -> RedisSettings:
    """Return settings with just these values, without reading the environment."""
    return RedisSettings.model_validate(values)


@pytest.mark.parametrize(
    ("url", "kind", "tls", "places", "rest"),
    [
        ("redis://127.0.0.1", Kind.SINGLE, False, "127.0.0.1:6379", {}),
        ("redis://localhost:7000/3", Kind.SINGLE, False, "localhost:7000", {"database": 3}),
        ("redis://[::1]:7000/", Kind.SINGLE, False, "[::1]:7000", {}),
        ("redis://u%40:p%2F%3A@h", Kind.SINGLE, False, "h:6379", {"user": "u@", "password": "p/:"}),
        ("redis://:pw@h:1", Kind.SINGLE, False, "h:1", {"password": "pw"}),
        ("rediss://h:6380/1", Kind.SINGLE, True, "h:6380", {"database": 1}),
        ("unix:///run/redis.sock", Kind.SINGLE, False, "/run/redis.sock", {}),
        ("unix://u:pw@/a%20b", Kind.SINGLE, False, "/a b", {"user": "u", "password": "pw"}),
        (
            "redis+sentinel://u:pw@a:1,b,[::1]:3/main/2",
            Kind.SENTINEL,
            False,
            "a:1 b:26379 [::1]:3",
            {"service": "main", "database": 2, "user": "u", "password": "pw"},
        ),
        ("rediss+sentinel://a/main", Kind.SENTINEL, True, "a:26379", {"service": "main"}),
        ("redis+cluster://a:1,b:2", Kind.CLUSTER, False, "a:1 b:2", {}),
        ("rediss+cluster://a", Kind.CLUSTER, True, "a:6379", {}),
    ],
)
def test_forms(url: str, kind: Kind, tls: bool, places: str, rest: dict[str, Any]) -> None:  # noqa: FBT001
    """Each supported form of Redis URL is parsed into its parts."""
    address = StoreAddress.of(url)
    assert (address.kind, address.tls) == (kind, tls)
    assert " ".join(map(str, address.hosts)) == places
    expected = {"service": "", "database": 0, "user": "", "password": ""} | rest
    assert {name: getattr(address, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        (SECRET, "redis://"),
        (f"http://{SECRET}@h", "redis+cluster://"),
        (f"redis://:{SECRET}@", "redis://"),
        (f"redis://:{SECRET}@h:99999", "redis://"),
        (f"redis://:{SECRET}@h:0", "1 to 65535"),
        (f"redis://:{SECRET}@h:x", "redis://"),
        (f"redis://:{SECRET}@h/x", "a whole number from 0 to 2147483647"),
        (f"redis://:{SECRET}@h/1/2", "a whole number from 0 to 2147483647"),
        (f"redis://:{SECRET}@h?ssl_cert_reqs=none", "variables instead"),
        (f"redis://h#{SECRET}", "variables instead"),
        (f"redis://:{SECRET}@h,i", "redis+sentinel://"),
        (f"redis://:{SECRET}@[::1", "redis://"),
        (f"redis://:{SECRET}@h h", "redis://"),
        (f"redis+sentinel://:{SECRET}@h", "name of the master"),
        (f"redis+sentinel://:{SECRET}@h/a%20b", "name of the master"),
        (f"redis+sentinel://:{SECRET}@h/main/x", "a whole number from 0 to 2147483647"),
        (f"redis+cluster://:{SECRET}@h/1", "one database"),
        (f"redis+cluster://:{SECRET}@h,,i", "redis+cluster://"),
        (f"unix://{SECRET}/h", "unix:///path"),
        ("unix://", "unix:///path"),
        ("unix:///" + "x" * 107, "107 bytes"),
        ("unix:///a%00b", "107 bytes"),
        ("redis://h?health_check_interval=-1", "0 for no checks"),
        (f"redis://h?health_check_interval={'9' * 400}", "0 for no checks"),
        ("redis://h?client_name=a%20b", "visible ASCII"),
        ("redis://h?client_name=%0aFOO", "visible ASCII"),
        ("redis://h?client_name=%C3%A9", "visible ASCII"),
        ("redis://h?db=2147483648", "a whole number from 0 to 2147483647"),
        ("redis://h/2147483648", "a whole number from 0 to 2147483647"),
        ("redis://h?db=-1", "a whole number from 0 to 2147483647"),
        ("redis://h?db=x", "option db"),
        ("redis://h/3?db=2", "in the path or as db"),
        ("redis://h?db=1&db=2", "option db more than once"),
        ("redis+cluster://h?db=1", "one database"),
        (f"redis://h?ssl_password={SECRET}", "option ssl_password without TLS"),
        ("unix:///s?ssl_ciphers=x", "option ssl_ciphers without TLS"),
    ],
)
def test_refusals(url: str, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault E9: an invalid URL is refused with an error that names the setting and the allowed forms, not the value."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", url)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(RedisSettings)
    message = str(caught.value)
    assert message.startswith("TASKQUEUE_REDIS_URL: got ")
    assert allowed in message
    shown = TracebackException.from_exception(caught.value, capture_locals=True)
    # The frame of the test has the secret among its own variables.
    frames = [frame for frame in shown.stack if frame.filename != __file__]
    assert SECRET not in message + "".join(f"{frame.locals}" for frame in frames)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    """Passwords do not appear in the text forms of settings and addresses."""
    file = tmp_path / "password"
    file.write_text(f"{SECRET}-file\n")
    ways = [
        settings(url=f"redis://user:{SECRET}@127.0.0.1"),
        settings(password=SECRET),
        settings(password_file=file),
        settings(url=f"redis+sentinel://:{SECRET}@127.0.0.1/main", sentinel_password=SECRET),
    ]
    for way in ways:
        assert way.password_now().startswith(SECRET)
        shown = f"{way!r} {way} {way.address!r} {way.address.shown} {way.model_dump()}"
        assert SECRET not in shown
        assert "user" not in way.address.shown


def test_a_password_file_is_read_each_time(tmp_path: Path) -> None:
    """The password file is read for each connection, so that a password can change without a restart."""
    file = tmp_path / "password"
    file.write_text("first\r\n")
    read = settings(password_file=file)
    file.write_text("second")
    assert read.password_now() == "second"
    file.write_text("third", encoding="utf-8-sig")
    assert read.password_now() == "third"
    file.unlink()
    with pytest.raises(ConfigurationError, match="TASKQUEUE_REDIS_PASSWORD_FILE: cannot be read"):
        read.password_now()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": f"redis://:{SECRET}@127.0.0.1", "password": SECRET}, "more than once"),
        ({"password": SECRET, "password_file": "/"}, "more than once"),
        ({"password_file": "/"}, "PASSWORD_FILE: cannot be read"),
        ({"url": "rediss://127.0.0.1", "tls_cert_file": "/x"}, "both or neither"),
        ({"tls_ca_file": "/x"}, "TLS_CA_FILE is allowed only"),
        ({"user": "someone"}, "a user is set without a password"),
        ({"user": "someone", "password": ""}, "a user is set without a password"),
        ({"sentinel_user": "someone"}, "a user is set without a password"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    """Fault E9: settings that contradict each other are refused with an error that names them."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        settings(**values)
    assert "TASKQUEUE_REDIS_" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"prefix": "a{b}"},
        {"prefix": ""},
        {"prefix": "a*"},
        {"prefix": "a\n"},
        {"connections": 0},
        {"answer_timeout": "inf"},
        {"connect_timeout": 0},
        {"appendfsync": "sometimes"},
    ],
)
def test_values_out_of_range(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting with an invalid value is refused with an error that names it."""
    ((name, value),) = values.items()
    monkeypatch.setenv(f"TASKQUEUE_REDIS_{name.upper()}", str(value))
    with pytest.raises(ConfigurationError, match=f"TASKQUEUE_REDIS_{name.upper()}"):
        load_settings(RedisSettings)


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"url": "redis://10.1.2.3"}, "TLS and a password is missing"),
        ({"url": f"redis://:{SECRET}@redis.example"}, "TLS is missing"),
        ({"url": "rediss://redis.example"}, "a password is missing"),
        ({"url": "redis+cluster://127.0.0.1:1,10.0.0.1:1"}, "TLS and a password is missing"),
        ({"url": f"rediss://:{SECRET}@redis.example"}, ""),
        ({"url": "redis://10.1.2.3", "allow_plaintext": True}, ""),
        ({"url": "redis://127.1.2.3"}, ""),
        ({"url": "redis://[::1]"}, ""),
        ({"url": "redis://localhost"}, ""),
        ({"url": "redis://localhost.evil.example"}, "TLS and a password is missing"),
        ({"url": "unix:///run/redis.sock"}, ""),
    ],
)
def test_exposed_servers_are_refused(values: dict[str, Any], missing: str) -> None:
    """A Redis on another machine needs TLS and a password, unless ``allow_plaintext`` is set."""
    if not missing:
        settings(**values)
        return
    with pytest.raises(ConfigurationError, match=missing) as caught:
        settings(**values)
    assert "TASKQUEUE_REDIS_ALLOW_PLAINTEXT" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_servers_that_are_found_later_are_refused_too() -> None:
    """An address reported by a Sentinel or a cluster node needs TLS and a password too."""
    with pytest.raises(ConfigurationError, match="TLS and a password is missing"):
        settings().refuse_exposed(HostAddress("10.0.0.1", 6379))


def tls_context(**values: Any) -> ssl.SSLContext:
    """Return the TLS context of a new connection."""
    options = Connector(settings(**values)).options()
    kind = options.pop("connection_class")
    context = kind(host="127.0.0.1", port=1, **options)._connection_arguments()["ssl"]
    assert isinstance(context, ssl.SSLContext)
    return context


def test_tls_is_verified_unless_disabled(tmp_path: Path) -> None:
    """Certificates are verified with TLS 1.2 or newer, unless ``dangerously_skip_tls_verification`` is set."""
    assert "ssl_cert_reqs" not in Connector(settings()).options()
    url = "rediss://127.0.0.1"
    authority, no_certificate = tmp_path / "ca.pem", tmp_path / "key.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    strict = tls_context(url=url, tls_ca_file=authority)
    assert strict.verify_mode is ssl.CERT_REQUIRED
    assert strict.check_hostname
    assert strict.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(strict.get_ca_certs()) == 1  # those of this machine are not trusted too
    loose = tls_context(url=url, dangerously_skip_tls_verification=True)
    assert loose.verify_mode is ssl.CERT_NONE
    assert not loose.check_hostname
    trustme.CA().private_key_pem.write_to_path(no_certificate)
    with pytest.raises(ConfigurationError, match="TASKQUEUE_REDIS_TLS_CA_FILE"):
        tls_context(url=url, tls_ca_file=no_certificate)
