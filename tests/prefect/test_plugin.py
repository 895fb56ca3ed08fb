"""Tests of the parts of the plugin that need no Prefect: names, settings and import hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.config import load_settings
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_prefect.names import client_of, connection_of, name_of, spelling_of
from taskqueue_prefect.plugin import ImportHookFinder, after_import
from taskqueue_prefect.settings import PrefectSettings, environment

A_KEY = "tasks.<locals>.add-1a2b3c4d"


@given(st.text(max_size=15))
def test_any_text_is_a_name(text: str) -> None:
    """Any short task key or client id is converted to a valid name, from which the original can be restored."""
    check_name("key", name_of(text))
    assert spelling_of(name_of(text)) == text


@given(st.text(min_size=LIMITS.name, max_size=400))
def test_a_long_text_is_a_name(text: str) -> None:
    """A text that is too long is shortened to a valid name, which differs for different texts."""
    check_name("key", name_of(text))
    assert name_of(text) != name_of(text + "x")


@given(st.text(max_size=15) | st.text(min_size=LIMITS.name, max_size=400))
def test_connections_of_a_client(client: str) -> None:
    """Row REV-E5: each connection has a different name, from which the client's id can be read.

    A long id is shortened.
    """
    one, other = connection_of(client, "1a2b3c4d"), connection_of(client, "5e6f7a8b")
    assert one != other
    check_name("consumer", one)
    assert client_of(one) == client_of(other)
    assert len(client) > 15 or client_of(one) == client


def test_usual_keys_are_names_as_they_are() -> None:
    """Usual keys are not changed, so operators can find a task's queue by its key (docs/prefect.md)."""
    assert name_of(A_KEY) == A_KEY
    assert name_of("host-4211") == "host-4211"


@pytest.mark.parametrize("prefix", ["PREFECT_SERVER_TASKS_SCHEDULING_", "PREFECT_TASK_SCHEDULING_"])
def test_names_of_prefects_manner(prefix: str) -> None:
    """Rows E4, OPEN-E3: environment variables in Prefect's style, with either prefix, set the same settings."""
    told = {
        f"{prefix}BACKEND": "prefect_redis.task_queue",
        f"{prefix}INFLIGHT_VISIBILITY_TIMEOUT": "45",
        f"{prefix}STREAM_MAX_RETRIES": "7",
    }
    assert environment(told) == {
        "TASKQUEUE_BACKEND": "redis",
        "TASKQUEUE_REDIS_LEASE": "45",
        "TASKQUEUE_PREFECT_MAX_LOSSES": "7",
    }


def test_own_names_go_first() -> None:
    """Row E4: a setting with this package's own variable has precedence."""
    told = {
        "TASKQUEUE_BACKEND": "memory",
        "PREFECT_TASK_SCHEDULING_BACKEND": "prefect_redis.task_queue",
        "PREFECT_REDIS_MESSAGING_HOST": "elsewhere",
    }
    assert environment(told) == {}
    assert environment({"PREFECT_API_URL": "http://127.0.0.1/api"}) == {}


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ({}, None),
        ({"URL": "redis+sentinel://a,b/main", "HOST": "not-this"}, "redis+sentinel://a,b/main"),
        ({"HOST": "r"}, "redis://r:6379/0"),
        ({"HOST": "::1", "PORT": "7000", "DB": "2"}, "redis://[::1]:7000/2"),
        (
            {"PASSWORD": "p@ss/word", "SSL": "true"},
            "rediss://default:p%40ss%2Fword@localhost:6379/0",
        ),
        ({"USERNAME": "u:x", "PASSWORD": "p"}, "redis://u%3Ax:p@localhost:6379/0"),
    ],
)
def test_where_prefects_messages_are(said: dict[str, str], url: str | None) -> None:
    """Row E4: the Redis of Prefect's messaging is used unless this package has a Redis URL of its own."""
    told = {f"PREFECT_REDIS_MESSAGING_{name}": value for name, value in said.items()}
    made = environment({"TASKQUEUE_BACKEND": "redis", **told})
    assert made == ({} if url is None else {"TASKQUEUE_REDIS_URL": url})
    own = {"TASKQUEUE_BACKEND": "redis", "TASKQUEUE_REDIS_URL": "redis://own"}
    assert environment({**own, **told}) == {}


def test_the_file_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row E4: settings are also read from ``.env``, as Prefect does; environment variables have precedence."""
    (tmp_path / ".env").write_text("TASKQUEUE_BACKEND=redis\nTASKQUEUE_PREFECT_GRACE=9\nOTHER=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "memory")
    assert environment() == {"TASKQUEUE_PREFECT_GRACE": "9"}
    assert load_settings(PrefectSettings).grace == 9


@pytest.mark.parametrize("name", ["CAPACITY", "GRACE", "PATIENCE", "STRICT"])
def test_a_bad_value_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row E4: an invalid setting raises an error with its name, but without its value."""
    monkeypatch.setenv(f"TASKQUEUE_PREFECT_{name}", "secret-nonsense")
    with pytest.raises(ConfigurationError, match=f"TASKQUEUE_PREFECT_{name}") as raised:
        load_settings(PrefectSettings)
    assert "nonsense" not in str(raised.value)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module that has not been imported."""
    name = "one_that_is_replaced"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, ImportHookFinder)]


def test_after_an_import(module: str) -> None:
    """The action runs after a module is executed, once per import or reload, and the module's loader is unchanged."""
    seen: list[ModuleType] = []
    after_import({module: seen.append})
    after_import({module: seen.append})
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [found]
    assert found.value == 1
    assert found.__spec__ is not None
    assert type(found.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.import_module(module)
    assert len(seen) == 1
    importlib.reload(found)
    assert len(seen) == 2


def test_after_an_import_that_was_before(module: str) -> None:
    """If the module is already imported, the action runs at once."""
    found = importlib.import_module(module)
    seen: list[ModuleType] = []
    after_import({module: seen.append})
    assert seen == [found]
