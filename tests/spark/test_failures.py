"""Tests of how failures are grouped, and of the list of tasks to redrive."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_spark.pipeline.failures import failures, message_of, redrive_list
from tests.spark.small_journals import (
    EPOCH,
    SmallJournal,
    at,
    histories,
    plan_of,
    random_journal,
    window_keys,
)

_UUID = "123e4567-e89b-12d3-a456-426614174000"
_MESSAGES = {
    "ValueError: bad number -12": "ValueError: bad number <number>",
    "timeout after 30.5s, then 1e-3": "timeout after <number>s, then <number>",
    "KeyError: 'frame 7'": "KeyError: <text>",
    'no column "size" in `t`': "no column <text> in <text>",
    "it can't read what isn't there": "it can't read what isn't there",
    "[1, 2, 3] is too long": "[<number>] is too long",
    f"task {_UUID} is gone": "task <id> is gone",
    f"job {'4f' * 16} failed": "job <hex> failed",
    "object at 0x7F3A91C0DE": "object at <hex>",
    "upload Z7kq93hTTp02mQ1aBc failed": "upload <id> failed",
    "[Errno 2] No such file: /srv/data/a-7.bin": "[Errno <number>] No such file: <path>",
    r"cannot open C:\data\x.bin now": "cannot open <path> now",
    "either/or, and/or": "either/or, and/or",
    "GET https://u:p@example.org/a?b=1 gave 503": "GET <url> gave <number>",
    "cannot reach 10.1.2.3:6379": "cannot reach <address>",
    "cannot reach fe80::1:2 or std::string": "cannot reach <address> or std::string",
    "ask jo.doe@example.org": "ask <address>",
    "due 2024-05-06T07:08:09.123Z, now 07:08:10": "due <time>, now <time>",
    "  lines\n\tand   blanks ": "lines and blanks",
    "": "(no error was given)",
    " \n": "(no error was given)",
    'Traceback (most recent call last):\n  File "/a.py", line 3\n    g()\nOSError: disk 7': "OSError: disk <number>",
}
_SECRETS = {
    "login failed: password=swordfish for bob": "login failed: password=<secret> for bob",
    'refused {"db_password": "sword fish", "n": 1}': "refused {<text>: <secret>, <text>: <number>}",
    '"sword fish' + " and fish" * 1000: "<text>",
    "PASSWD: 'sword fish' was wrong": "PASSWD: <secret> was wrong",
    "the api-key is swordfish": "the api-key is <secret>",
    "Authorization: Basic c3dvcmRmaXNo": "Authorization: <secret>",
    "sent Bearer swordfish-swordfish to it": "sent Bearer <secret> to it",
    "Cookie: id=swordfish; x=swordfish": "Cookie: <secret>",
    "redis://:swordfish@10.0.0.1:6379/0 is away": "<url> is away",
    "token eyJhbGciOi.swordfish.swordfish": "token <secret>",
    "with sk_live_swordfish": "with <secret>",
    "aws_secret_access_key => swordfish, region": "aws_secret_access_key => <secret>, region",
    "-----BEGIN RSA PRIVATE KEY-----\nswordfish\n-----END RSA PRIVATE KEY-----": "<secret>",
    'passphrase="sword fish that was cut off': "passphrase=<secret>",
}


def test_what_differs_is_taken_out_and_secrets_are_masked(spark: SparkSession) -> None:
    """Variable parts of an error are replaced, secrets are masked, and long errors are cut (G10)."""
    parts = ("x", "a1", "7,", "7 ", "'", "::", "/a", "a.b@", "a-", "<number> ", " ", "token ")
    long = [part * LIMITS.text for part in parts]
    texts = [*_MESSAGES, *_SECRETS, *long]
    message = message_of(fn.col("error")).alias("message")
    frame = spark.createDataFrame([(text,) for text in texts], "error string")
    found = {row.error: row.message for row in frame.select("error", message).collect()}
    assert {text: found[text] for text in _MESSAGES} == _MESSAGES
    assert {text: found[text] for text in _SECRETS} == _SECRETS
    assert not [text for text in _SECRETS if re.search("swordfish|sword fish|c3dv", found[text])]
    assert all(len(found[text]) <= 300 for text in long)


def test_clusters_by_hand(spark: SparkSession) -> None:
    """For each failure, attempts, tasks, dead and recovered tasks are counted, with sample ids (G10)."""
    journal = SmallJournal()
    journal.tell(0, "configured", reason="{}")
    for number in range(8):
        journal.tell(number, "delivered", f"t{number}")
        journal.tell(number, "retried", f"t{number}", error=f"bad {number}")
        journal.tell(10 + number, "delivered", f"t{number}")
    for number in range(3):
        journal.tell(
            20 + number, "dead_lettered", f"t{number}", error=f"bad {number}", reason="given up"
        )
    journal.tell(30, "acked", "t3")
    journal.tell(31, "dead_lettered", "t4", error="worse")
    journal.tell(32, "redriven", "t2")  # redriven, so it is no longer dead
    journal.tell(33, "discarded", "t1")  # discarded, so it cannot be redriven
    journal.tell(34, "dead_lettered", "t5", reason="max_losses_exceeded")
    journal.rows.append(journal.rows[-1])  # repeats a row, as if the line was read twice
    journal.tell(35, "damaged", reason="torn")
    frame = journal.frame(spark)
    found = {row.message: row for row in failures(frame).collect()}
    assert set(found) == {"bad <number>", "worse", "max_losses_exceeded"}
    bad = found["bad <number>"]
    assert (bad.key, bad.attempts, bad.share, bad.tasks, bad.dead, bad.recovered) == (
        "k",
        11,
        11 / 13,
        8,
        1,
        1,
    )
    assert bad.samples == ["t0", "t1", "t2", "t3", "t4"]
    assert bad.first_seen.replace(tzinfo=EPOCH.tzinfo) == at(0)
    assert bad.last_seen.replace(tzinfo=EPOCH.tzinfo) == at(22)
    assert (found["max_losses_exceeded"].attempts, found["max_losses_exceeded"].dead) == (1, 1)
    assert bad.fingerprint == hashlib.sha256(b"bad <number>").hexdigest()[:16]

    dead = {row.task_id for row in redrive_list(frame).collect()}
    assert dead == {"t0", "t4", "t5"}
    assert [tuple(row) for row in redrive_list(frame, bad.fingerprint).collect()] == [("k", "t0")]
    for nonsense in ("", "bad <number>", "C9E9F0DB4D7A2D3C"):
        with pytest.raises(InvalidInput, match="fingerprint"):
            redrive_list(frame, bad.fingerprint, nonsense)


def _said(row: dict[str, Any]) -> str:
    error = row["error"] or (row["reason"] if row["event"] == "dead_lettered" else None)
    if error is None:
        return "(no error was given)"
    return (
        re.sub(r"\d+(\.\d+){3}", "<address>", error)
        if "." in error
        else re.sub(r"\d+", "<number>", error)
    )


@pytest.mark.usefixtures("compiled")
def test_plain_python_finds_the_same_clusters(spark: SparkSession) -> None:
    """For a random journal, the groups of failures equal those of a plain Python loop (G10; fault L2)."""
    journal = random_journal(6)
    tasks: dict[Any, dict[str, list[bool]]] = defaultdict(
        lambda: defaultdict(lambda: [False, False])
    )
    attempts: dict[Any, int] = defaultdict(int)
    relevant = {"retried", "dead_lettered", "acked", "redriven", "discarded"}
    for history in histories(journal.rows):
        told = [row for row in history if row["event"] in relevant]
        acked = [row["seq"] for row in told if row["event"] == "acked"]
        for row in told:
            if row["event"] in {"retried", "dead_lettered"}:
                cluster = (row["key"], _said(row))
                attempts[cluster] += 1
                fate = tasks[cluster][row["task_id"]]
                fate[0] |= row is told[-1] and row["event"] == "dead_lettered"
                fate[1] |= any(seq > row["seq"] for seq in acked)
    wanted = {
        cluster: (
            attempts[cluster],
            len(of_tasks),
            sum(dead for dead, _ in of_tasks.values()),
            sum(recovered for _, recovered in of_tasks.values()),
            sorted(of_tasks)[:5],
        )
        for cluster, of_tasks in tasks.items()
    }
    rows = failures(journal.frame(spark)).collect()
    found = {
        (row.key, row.message): (row.attempts, row.tasks, row.dead, row.recovered, row.samples)
        for row in rows
    }
    assert found == wanted


def test_a_failure_that_all_tasks_have_is_spread(spark: SparkSession) -> None:
    """Only the events of one task are sorted before aggregation, so the work is spread (G10; fault L3)."""
    journal = SmallJournal()
    journal.tell(0, "retried", "a")
    plan = plan_of(failures(journal.frame(spark)))
    orders = window_keys(plan)
    assert len(orders) > 1
    assert all("task_id" in keys or "partial_sum" in plan[plan.index(keys) :] for keys in orders)
    assert "partial_min_by" in plan
