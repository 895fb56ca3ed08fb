"""The command ``taskqueue queue``, and how other commands show limits."""

import asyncio
from typing import Any

import pytest

from taskqueue_core import confirmations
from taskqueue_core.capabilities import Order, Owner, QueueSettings
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Task
from tests.cli.conftest import Cli
from tests.cli.shared import Shared

KEY = "resize"


def in_force(store: Shared, key: str = KEY) -> QueueSettings:
    """Return the current settings of a queue in the store."""
    return asyncio.run(store.control.settings(key))


def publish(store: Shared, *ids: str, key: str = KEY) -> None:
    """Publish tasks with these ids."""
    asyncio.run(store.publisher.publish(*(Task(key=key, id=task_id) for task_id in ids)))


def test_limits_are_set_one_by_one(cli: Cli, store: Shared) -> None:
    """Setting one limit leaves the others unchanged, and the command prints all limits that are in force."""
    publish(store, "a")
    done = cli("queue", "set", KEY, "--capacity", "10", "--rate", "100/1m")
    assert (done.code, done.err) == (0, "")
    assert done.out.split() == f"✔ {KEY}: capacity 10, 100/1m version 1".split()
    told = cli("queue", "set", KEY, "--max-inflight", "3", "--paused", "--json").json
    limit = {"max_tokens": 100, "interval": 1, "interval_unit": "MINUTES"}
    assert told == in_force(store).model_dump(mode="json") | {"key": KEY}
    assert (told["version"], told["capacity"], told["rate_limit"]) == (2, 10, limit)
    assert (told["max_inflight"], told["paused"]) == (3, True)
    assert cli("queue", "show", KEY, "--json").json == told
    shown = cli("queue", "show", KEY).out
    assert "100/1m" in shown
    assert "max attempts 50" in shown
    listed = ["--index", "user", "--index", "order", "--keep-ended", "60", "--keep-ended-most", "9"]
    assert (
        "indexed by user order, keeps ended tasks for 60 s" in cli("queue", "set", KEY, *listed).out
    )
    settings = in_force(store)
    assert (settings.index, settings.keep_ended, settings.keep_ended_most) == (
        ("user", "order"),
        60,
        9,
    )
    kept = ["--stream-events", "5", "--stream-bytes", "2048", "--stream-ttl", "60"]
    cli("queue", "set", KEY, *kept)
    settings = in_force(store)
    assert (settings.stream_events, settings.stream_bytes, settings.stream_ttl) == (5, 2048, 60)
    kept = ["--stream-events", "1000", "--stream-bytes", "1048576", "--stream-ttl", "3600"]
    cli("queue", "set", KEY, *kept)
    cli("queue", "set", KEY, "--index", "none", "--keep-ended", "0", "--keep-ended-most", "100000")
    cleared = ["--capacity", "none", "--rate", "none", "--max-inflight", "none", "--resumed"]
    assert "no limits" in cli("queue", "set", KEY, *cleared).out
    assert in_force(store).model_copy(update={"owners": {}}) == QueueSettings(version=7)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("1000/1s", (1000, 1, "SECONDS")),
        ("15/1h", (15, 1, "HOURS")),
        ("5/m", (5, 1, "MINUTES")),
        ("7/90s", (7, 90, "SECONDS")),
    ],
)
def test_rates(words: str, limit: tuple[Any, ...], cli: Cli) -> None:
    """A rate is a number of tasks in a time of seconds, minutes or hours."""
    told = cli("queue", "set", KEY, "--rate", words, "--json").json["rate_limit"]
    assert tuple(told.values()) == limit


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--capacity", "0"], "capacity"),
        (["--capacity", "much"], "capacity"),
        (["--max-inflight", "-1"], "max_inflight"),
        (["--rate", "100"], "rate"),
        (["--rate", "٣/1s"], "rate"),
        (["--rate", "0/1s"], "rate_limit.max_tokens"),
        (["--tenant-rate", "1/1d"], "tenant_rate"),
        (["--weight", "a"], "weight"),
        (["--weight", "a=much"], "weight"),
        (["--order", "fair", "--weight", "a=0"], "weights"),
        (["--floor-share", "0.9"], "floor_share"),
        (["--max-processing-time", "soon"], "max_processing_time"),
    ],
)
def test_bad_limits_are_named(words: list[str], field: str, cli: Cli, store: Shared) -> None:
    """Fault K4: an invalid limit is refused with its field and the allowed values, and nothing is changed."""
    done = cli("queue", "set", KEY, *words, "--json")
    assert (done.code, done.json["error"]["field"]) == (2, field)
    assert "; allowed: " in done.json["error"]["detail"]
    assert in_force(store).version == 0


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--capacity", "capacity"),
        ("--max-inflight", "max_inflight"),
        ("--rate", "rate_limit"),
        ("--max-processing-time", "max_processing_time"),
        ("--tenant-capacity", "tenant_capacity"),
        ("--tenant-max-inflight", "tenant_max_inflight"),
        ("--tenant-rate", "tenant_rate_limit"),
    ],
)
def test_no_limit_is_one_word(option: str, name: str, cli: Cli) -> None:
    """U3: "none" removes each limit, and is null in JSON and None in Python; 0 is refused."""
    value = "5/1m" if option.endswith("rate") else "5"
    assert cli("queue", "set", KEY, "--order", "fair", option, value, "--json").json[name]
    assert cli("queue", "set", KEY, option, "none", "--json").json[name] is None
    assert getattr(QueueSettings(), name) is None
    zero = "0/1m" if option.endswith("rate") else "0"
    assert cli("queue", "set", KEY, option, zero).code == 2


def test_the_retry_policy_is_set(cli: Cli, store: Shared) -> None:
    """U3: options set single fields of a queue's retry policy and keep the others."""
    words = ["--max-attempts", "8", "--retry-base", "2", "--retry-cap", "600"]
    assert cli("queue", "set", KEY, *words).code == 0
    told = cli("queue", "set", KEY, "--retry-jitter", "0.5", "--json").json["retry"]
    shape = {"factor": 2, "delays": []}
    assert told == {"base": 2, "cap": 600, "jitter": 0.5, "max_attempts": 8, **shape}
    assert in_force(store).retry == RetryPolicy(base=2, cap=600, jitter=0.5, max_attempts=8)
    options = ["--retry-factor", "3", "--retry-delays", "5, 60,0.5"]
    told = cli("queue", "set", KEY, *options, "--json").json["retry"]
    assert (told["factor"], told["delays"], told["cap"]) == (3, [5, 60, 0.5], 600)
    assert (
        cli("queue", "set", KEY, "--retry-delays", "none", "--json").json["retry"]["delays"] == []
    )
    wrong = cli("queue", "set", KEY, "--max-attempts", "0", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "retry.max_attempts")
    wrong = cli("queue", "set", KEY, "--retry-delays", "5,none", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "retry_delays")


def test_changed_fields_are_the_operators(cli: Cli, store: Shared) -> None:
    """U4: ``queue set`` makes the fields that it changes the operator's, until they are given back."""
    told = cli("queue", "set", KEY, "--timeout", "30", "--result-ttl", "60", "--json").json
    assert told["owners"] == {"timeout": "operator", "result_ttl": "operator"}
    assert "an attempt fails after 30 s" in cli("queue", "list").out
    cli("queue", "set", KEY, "--timeout", "none")
    assert in_force(store).owners["timeout"] is Owner.OPERATOR
    told = cli("queue", "set", KEY, "--give-back", "result-ttl", "--json").json
    assert told["owners"] == {"timeout": "operator", "result_ttl": "declared"}
    assert told["result_ttl"] == 60
    wrong = cli("queue", "set", KEY, "--give-back", "paused", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "give_back")
    assert cli("queue", "reset", KEY, "--json").json["owners"] == {}


def test_order_and_tenants(cli: Cli, store: Shared) -> None:
    """B12, OPEN-B4: all settings about order and tenants can be set, shown and reset.

    Setting the weight of one tenant leaves the other weights unchanged.
    """
    publish(store, "a")
    tenants = ["--tenant-capacity", "1000", "--tenant-max-inflight", "5", "--tenant-rate", "7/1m"]
    weights = ["--weight", "a=3", "--weight", "b=2"]
    rest = ["--floor-share", "0.1", "--max-processing-time", "600"]
    done = cli("queue", "set", KEY, "--order", "fair", *weights, *tenants, *rest)
    assert (done.code, done.err) == (0, "")
    said = (
        "redelivered after 600 s without progress, fair, weights a=3 b=2, capacity 1,000 per tenant, "
        "5 in flight per tenant, 7/1m per tenant, 10% for each priority"
    )
    assert " ".join(done.out.split()) == f"✔ {KEY}: {said} version 1"
    settings = in_force(store)
    assert (settings.order, settings.weights) == (Order.FAIR, {"a": 3, "b": 2})
    assert (settings.tenant_capacity, settings.tenant_max_inflight) == (1000, 5)
    assert settings.tenant_rate_limit == RateLimit(max_tokens=7, interval_unit=IntervalUnit.MINUTES)
    assert (settings.floor_share, settings.max_processing_time) == (0.1, 600)
    assert said in " ".join(cli("queue", "list").out.split())
    shown = [" ".join(line.split()) for line in cli("queue", "show", KEY).out.splitlines()]
    assert {"order fair", "weights a=3, b=2", "tenant rate limit 7/1m", "bound to none"} <= set(
        shown
    )
    flow = cli("stats", KEY, "--json").json[0]["flow"]
    assert (flow["order"], flow["weights"]) == ("fair", {"a": 3, "b": 2})
    told = cli("queue", "set", KEY, "--weight", "b=none", "--weight", "c_d=5", "--json").json
    assert told["weights"] == {"a": 3, "c_d": 5}
    many = [word for n in range(6) for word in ("--weight", f"t{n}=2")]
    assert "weights t0=2 t1=2 t2=2 and 3 more" in cli(
        "queue", "set", KEY, "--weight", "none", *many
    ).out.replace("\n", " ")
    cleared = ["--weight", "none", "--tenant-capacity", "none", "--tenant-max-inflight", "none"]
    cleared += ["--tenant-rate", "none", "--floor-share", "0", "--max-processing-time", "none"]
    assert "no limits" in cli("queue", "set", KEY, "--order", "fifo", *cleared).out
    assert in_force(store).model_copy(update={"owners": {}}) == QueueSettings(version=4)


def test_settings_that_need_fair_order_are_named(cli: Cli, store: Shared) -> None:
    """Fault K4: if a setting requires fair order, the error names the setting and the requirement.

    This holds whether the setting or the order is changed.
    """
    for words, field in (
        (["--tenant-capacity", "5"], "tenant_capacity"),
        (["--weight", "a=2"], "weights"),
    ):
        error = cli("queue", "set", KEY, *words, "--json").json["error"]
        assert error["field"] == field
        assert "needs order 'fair'" in error["detail"]
        cli("queue", "set", KEY, "--order", "fair", *words)
        error = cli("queue", "set", KEY, "--order", "fifo", "--json").json["error"]
        assert error["field"] == field
        cli("queue", "reset", KEY)
    assert in_force(store).order is Order.FIFO


def test_bindings(cli: Cli, store: Shared) -> None:
    """D9: a bound queue keeps a copy of each task, unless it is a topic.

    The command prints all bindings, and unbinding an unknown queue is an error.
    """
    publish(store, "a")
    done = cli("queue", "bind", KEY, "mail", "audit")
    assert (done.code, done.err) == (0, "")
    assert f"copied to {KEY} mail audit" in done.out
    assert cli("queue", "bind", KEY, "mail", "log", "--json").json["bound_to"] == [
        KEY,
        "mail",
        "audit",
        "log",
    ]
    assert f"copied to {KEY} mail audit and 1 more" in cli("queue", "list").out
    assert cli("queue", "bind", KEY, "log", "--topic", "--json").json["bound_to"] == [
        "mail",
        "audit",
        "log",
    ]
    wrong = cli("queue", "unbind", KEY, "mial", "--json")
    assert (wrong.code, wrong.json["error"]["field"]) == (2, "OTHER")
    assert "allowed: mail, audit, log" in wrong.json["error"]["detail"]
    assert cli("queue", "unbind", KEY, "audit", "mail", "log", "--json").json["bound_to"] == []
    cli("queue", "bind", KEY, "mail")
    version = in_force(store).version
    assert cli("queue", "unbind", KEY, "mail", "--json").json["bound_to"] == []
    assert cli("queue", "bind", KEY, KEY, "--json").json["version"] == version + 1
    assert cli("queue", "bind", KEY, "mail", "--version", "0").code == 1
    assert cli("queue", "bind", KEY, "a/b", "--json").json["error"]["field"] == "bound_to"
    assert cli("queue", "bind", KEY).code == 2


def test_nothing_to_set(cli: Cli) -> None:
    """``queue set`` without any option is an error."""
    assert cli("queue", "set", KEY).code == 2


def test_a_version_is_compared(cli: Cli, store: Shared) -> None:
    """Fault K6: with --version, a command fails if the settings have changed since that version."""
    cli("queue", "set", KEY, "--capacity", "5")
    for words in (["set", KEY, "--capacity", "6"], ["reset", KEY]):
        done = cli("queue", *words, "--version", "0", "--json")
        assert (done.code, done.json["error"]["code"]) == (1, "settings_conflict")
    assert in_force(store).capacity == 5
    assert cli("queue", "reset", KEY, "--version", "1", "--json").json["version"] == 2
    assert in_force(store) == QueueSettings(version=2)


@pytest.mark.parametrize(
    ("words", "flag", "shown"),
    [([], "paused", "paused"), (["--intake"], "intake_paused", "intake paused")],
)
def test_pausing(words: list[str], flag: str, shown: str, cli: Cli, store: Shared) -> None:
    """Delivery and intake can each be paused and resumed, and repeating a command is harmless."""
    publish(store, "a")
    for _ in range(2):
        done = cli("queue", "pause", KEY, *words)
        assert (done.code, done.err) == (0, "")
        assert f"{KEY}: {shown}  version 1" in done.out
    assert in_force(store) == QueueSettings.model_validate({"version": 1, flag: True})
    told = cli("queue", "resume", KEY, *words, "--json").json
    assert (told["key"], told["version"], told[flag]) == (KEY, 2, False)


def test_an_unused_queue(cli: Cli, store: Shared) -> None:
    """A queue can be paused before its first task, with a warning in case the name is mistyped."""
    done = cli("queue", "pause", "typo", "--json")
    assert (done.code, done.json["paused"]) == (0, True)
    assert "no task has been published to 'typo'" in done.err
    publish(store, "a")
    missing = cli("queue", "show", "nobody", "--json")
    assert missing.code == 2
    assert f"an existing queue ({KEY}, typo)" in missing.json["error"]["detail"]
    assert cli("queue", "pause", "a/b").code == 2


def test_a_queue_is_deleted(cli: Cli, store: Shared) -> None:
    """A8: `queue delete` asks first, refuses a queue that is in use, and says what it did."""
    publish(store, "a")
    assert cli("queue", "delete", KEY).code == 2, "deleted without a confirmation"
    used = cli("queue", "delete", KEY, "--yes", "--json")
    assert used.code == 1
    assert "waiting tasks: 1" in used.json["error"]["detail"]
    asyncio.run(store.control.purge(KEY))
    done = cli("queue", "delete", KEY, "--yes")
    assert (done.code, done.err) == (0, "")
    assert done.out.split() == f"✔ {KEY} deleted, with 1 ended task".split()
    again = cli("queue", "delete", KEY, "--yes", "--json")
    assert (again.code, again.json["deleted"]) == (0, False)
    assert cli("queue", "list", "--json").json == []


def test_queues_are_listed(cli: Cli, store: Shared) -> None:
    """The list of queues shows waiting tasks, running tasks and limits; stats shows the limits, too."""
    assert "taskqueue publish" in cli("queue", "list").out
    assert cli("queue", "list", "--json").json == []
    publish(store, "a", "b")
    publish(store, "a", key="free")
    cli("queue", "set", KEY, "--capacity", "2000", "--intake-paused", "--max-inflight", "5")
    free, limited = cli("queue", "list", "--json").json
    assert (free["key"], free["capacity"], free["ledger"]["waiting"]) == ("free", None, 1)
    assert (limited["capacity"], limited["intake_paused"]) == (2000, True)
    limits = "intake paused, capacity 2,000, 5 in flight"
    assert limits in cli("queue", "list").out
    stats = cli("stats").out
    assert f"{KEY}: {limits}" in stats
    assert "free:" not in stats
    flow = {"capacity": 2000, "max_inflight": 5, "intake_paused": True}
    assert [one["flow"] for one in cli("stats", "--json").json] == [{}, flow]


def test_a_refused_publish(cli: Cli, store: Shared) -> None:
    """B13: a refused publish exits with 1 and reports the reason, the depth and when to retry."""
    cli("queue", "set", KEY, "--capacity", "1")
    publish(store, "a")
    done = cli("publish", KEY, "--json")
    assert done.code == 1
    error = done.json["error"]
    assert (error["code"], error["depth"]) == ("queue_full", 1)
    assert error["retry_after"] > 0
    cli("queue", "pause", KEY, "--intake")
    waited = cli("publish", KEY, "--wait", "0.05", "--json")
    assert (waited.code, waited.json["error"]["code"]) == (1, "intake_paused")


def test_a_file_of_tasks_waits_for_room(
    cli: Cli, store: Shared, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: with --wait, the tasks of a file are published as capacity becomes free.

    Lines that are refused until the time is over are reported with their numbers.
    """
    cli("queue", "set", KEY, "--capacity", "2")
    file = tmp_path / "tasks.ndjson"
    file.write_text("".join(f'{{"id":"t{n}"}}\n' for n in range(4)))
    done = cli("publish", KEY, "--batch", str(file), "--wait", "0.05", "--json")
    assert (done.code, done.json["accepted"], done.json["refused"]) == (1, 2, 2)
    assert done.json["faults"][0]["line"] == 3
    hints = confirmations.retry_hints
    monkeypatch.setattr(
        "taskqueue_core.queue.retry_hints", lambda told: dict.fromkeys(hints(told), 0)
    )
    right = store.publisher.publish

    async def with_a_consumer(*tasks: Task) -> Any:
        confirmations = await right(*tasks)
        async with store.subscribe([KEY], "w") as subscription:
            await subscription.ack(*(await subscription.receive(10, 0)).deliveries)
        return confirmations

    monkeypatch.setattr(store.publisher, "publish", with_a_consumer)
    done = cli("publish", KEY, "--batch", str(file), "--wait", "20", "--json")
    assert (done.code, done.json["accepted"], done.json["duplicate"]) == (0, 2, 2)


def test_a_journal_is_a_setting(cli: Cli) -> None:
    """G10: the journal can be switched on and off by an option; a store without a journal reports an error."""
    done = cli("queue", "set", KEY, "--journal", "--json")
    assert (done.code, done.json["error"]["field"]) == (2, "journal")
    assert cli("queue", "set", KEY, "--no-journal", "--json").json["journal"] is False


def test_through_a_server(cli: Cli, server: str) -> None:
    """B13: queue commands work through a server in the same way, and its refusals are reported unchanged."""
    there = ("--server", server, "--json")
    assert cli("queue", "set", "http", "--capacity", "1", *there).json["capacity"] == 1
    assert cli("publish", "http", *there).json["status"] == "accepted"
    full = cli("publish", "http", *there).json["error"]
    assert (full["code"], full["depth"]) == ("queue_full", 1)
    assert cli("queue", "pause", "http", "--intake", *there).json["intake_paused"]
    assert cli("publish", "http", *there).json["error"]["code"] == "intake_paused"
    (listed,) = [one for one in cli("queue", "list", *there).json if one["key"] == "http"]
    assert cli("queue", "show", "http", *there).json["version"] == listed["version"] == 2
    assert cli("queue", "reset", "http", *there).json["version"] == 3
    assert cli("publish", "http", *there).json["status"] == "accepted"
