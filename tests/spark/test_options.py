"""Tests of the source's options: each value is checked, and an error names the option and the allowed values."""

from __future__ import annotations

import pickle

import pytest

from taskqueue_core.errors import ConfigurationError, InvalidInput, TaskQueueError
from taskqueue_spark.options import ReadOptions, resource_of
from taskqueue_spark.sink.store import SparkStore


def test_defaults() -> None:
    """Without options, a journal in Redis is read from its first to its last transition (G8)."""
    options = ReadOptions.of({})
    assert (options.backend, options.starting, options.ending) == ("redis", "earliest", "latest")
    assert options.fail
    assert not options.pushdown
    assert resource_of({}) == "journal"
    assert ReadOptions.of({"path": "x"}).backend == "lines"
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301 - Spark pickles options too


def test_names_and_words_have_no_case() -> None:
    """Option names and keywords may be written in any case (G8)."""
    told = {
        "STARTINGOFFSETS": "Latest",
        "FailOnDataLoss": "FALSE",
        "events": "acked, published",
        "keys": "a,b",
    }
    options = ReadOptions.of(
        told | {"maxspanpertrigger": "5m", "startingTimestamp": "1970-01-01T00:00:01"}
    )
    assert (options.starting, options.fail, options.max_span, options.since) == (
        "latest",
        False,
        300,
        1_000_000,
    )
    assert options.events == frozenset({"acked", "published"})
    assert options.keys == frozenset("ab")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "secret"), ("startingOffsets", "secret"), ("endingOffsets", "{"), ("startingTimestamp", "secret"),
        ("events", "secret"), ("keys", " , "), ("splitsPerShard", "0"), ("fetchSize", "secret"), ("batchSize", "1.5"),
        ("pushdown", "secret"), ("maxEventsPerTrigger", "0"), ("maxSpanPerTrigger", "secret"), ("partitions", "-1"),
        ("maxSpanPerTrigger", "-5m"), ("maxSpanPerTrigger", "nan"), ("failOnDataLoss", "secret"), ("keys", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, value: str) -> None:
    """A wrong value is refused with the option's name and the allowed values, and is not repeated (G8)."""
    with pytest.raises(InvalidInput, match=f"^option {name}: .*; allowed: ") as raised:
        ReadOptions.of({name: value})
    assert "secret" not in str(raised.value)


def test_what_is_not_known_is_refused() -> None:
    """An unknown option name or value is refused, not ignored (G8)."""
    with pytest.raises(ConfigurationError, match="startingOffsets"):
        ReadOptions.of({"startingOffset": "latest"})
    with pytest.raises(InvalidInput, match="path"):
        ReadOptions.of({"backend": "lines"})
    with pytest.raises(InvalidInput, match="dead_letters"):
        resource_of({"resource": "secret"})


@pytest.mark.parametrize(
    "told",
    [
        {"path": "x", "backend": "redis"}, {"url": "redis://h", "path": "x", "backend": "lines"},
        {"prefix": "x", "path": "x"}, {"fetchSize": "5", "path": "x"}, {"urlEnv": "X", "backend": "lines", "path": "x"},
        {"partitions": "2", "path": "x"}, {"path": "x", "url": "redis://h"},
    ],
)  # fmt: skip
def test_what_another_backend_has_is_not_passed_over(told: dict[str, str]) -> None:
    """An option that has no effect with the chosen backend is refused (G8)."""
    with pytest.raises(
        InvalidInput, match=f"^option ({'|'.join(told)}): got a value with backend="
    ) as raised:
        ReadOptions.of(told)
    assert "allowed: a value only with backend=" in str(raised.value)


def test_what_has_no_meaning_is_not_passed_over() -> None:
    """An option for streams is refused in a batch read, and vice versa; default values are allowed in both (G8)."""
    for name, value in (
        ("endingOffsets", '{"a": 5}'),
        ("endingOffsets", "earliest"),
        ("pushdown", "true"),
    ):
        options = ReadOptions.of({name: value})
        options.check(stream=False)
        with pytest.raises(
            InvalidInput,
            match=f"^option {name}: got a value with readStream; allowed: a value only with read$",
        ):
            options.check(stream=True)
    for name, value in (("maxEventsPerTrigger", "5"), ("maxSpanPerTrigger", "5m")):
        options = ReadOptions.of({name: value})
        options.check(stream=True)
        with pytest.raises(
            InvalidInput,
            match=f"^option {name}: got a value with read; allowed: a value only with readStream$",
        ):
            options.check(stream=False)
    ReadOptions.of({"endingOffsets": "latest", "pushdown": "false"}).check(stream=True)


def test_a_password_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with a password must come from the environment, because Spark shows options (G8)."""
    with pytest.raises(TaskQueueError, match="TASKQUEUE_REDIS_PASSWORD") as raised:
        ReadOptions.of({"url": "redis://:secret@localhost"})
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="both"):
        ReadOptions.of({"url": "redis://localhost", "urlEnv": "X"})
    monkeypatch.setenv("THE_URL", "redis://:secret@localhost:1234")
    options = ReadOptions.of({"urlEnv": "THE_URL", "prefix": "p", "partitions": "3"})
    settings = options.store.redis_settings()
    assert (settings.password_now(), settings.prefix, settings.partitions_of) == ("secret", "p", 3)
    with pytest.raises(ConfigurationError, match="urlEnv"):
        SparkStore(url_env="NO_SUCH").redis_settings()
    with pytest.raises(TaskQueueError, match="PREFIX") as raised:
        SparkStore(prefix="{secret}").redis_settings()
    assert "{secret}" not in str(raised.value)
