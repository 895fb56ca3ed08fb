"""Repeated failures: errors that differ only in numbers, ids or quoted text count as the same failure."""

from __future__ import annotations

import re

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of

SAMPLES = 5
_LONGEST = 300
_LOOKED_AT = 1000
"""number of characters of an error that are used; later characters are not shown, and often differ between tasks"""
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_NOTHING = "(no error was given)"
_SENSITIVE = (
    "password|passwd|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential"
    "|signature|session[_-]?id"
)
_NAMED_SECRET = (
    rf"(?i)([\w-]{{0,30}}(?:{_SENSITIVE})[\w-]{{0,30}}[\"']?\s{{0,3}}(?:=>|[:=]|\bis\b)\s{{0,3}})"
    r"(\"[^\"]*\"?|'[^']*'?|[^\s,;&)}\]]+)"
)
_QUOTED = r"\"[^\"]*(?:\"|\z)|`[^`]*(?:`|\z)|(?<![A-Za-z0-9])'[^']*(?:'(?![A-Za-z0-9])|\z)"
_TIME = (
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:[.,]\d{1,9})?)?"
    r"(?: ?Z\b|[+-]\d{2}:?\d{2}\b)?|\b\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?\b"
)

# Regular expressions of Java, applied in this order. Java matches a repeated group by recursion, and a stack overflow
# would stop the executor. Therefore only sets of characters are repeated without a limit, and never groups.
_RULES = (
    # Secrets, which must be removed before anything else is replaced.
    (r"-----BEGIN [^-]{1,64}-----[^-]*(?:-----END [^-]{1,64}-----)?", "<secret>"),
    (r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(\W{0,3}[:=])[^\r\n]+", "$1$2 <secret>"),
    (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", "$1 <secret>"),
    (r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_.-]+", "<secret>"),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b", "<secret>"),
    (r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs])[-_][A-Za-z0-9_-]{8,}", "<secret>"),
    # A URL is replaced as a whole, including any user name and password.
    (r"[A-Za-z][A-Za-z0-9+.-]{0,15}://\S+", "<url>"),
    (_NAMED_SECRET, "$1<secret>"),
    # Values that differ between tasks.
    (_QUOTED, "<text>"),
    (_TIME, "<time>"),
    (r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}", "<address>"),
    (r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?::\d{1,5})?\b", "<address>"),
    (r"(?i)(?<![\w:])\[?(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}\]?(?::\d{1,5})?(?![\w:])", "<address>"),
    (r"\b[A-Za-z]:\\[^\s\"'<>|]+", "<path>"),
    (r"(?<![\w>/.~])~?\.{0,2}/[\w.@+%~/-]+", "<path>"),
    (r"\b0[xX][0-9a-fA-F]+\b", "<hex>"),
    (r"\b(?=[0-9a-fA-F]{0,128}\d)(?=\d{0,128}[a-fA-F])[0-9a-fA-F]{6,}\b", "<hex>"),
    (r"\b(?=[A-Za-z]{0,128}\d)(?=\d{0,128}[A-Za-z])[A-Za-z0-9]{16,}\b", "<id>"),
    (r"(?:(?<![\w>)])[+-])?\d+(?:[.,_]\d{1,30}){0,30}(?:[eE][+-]?\d{1,4}\b)?", "<number>"),
    # Replace a list of values of one kind, of any length, with a single value.
    (r"(?<=<(number|text|hex|id|time|address|path)>)[,;]? ?<\1>", ""),
    (r"\s+", " "),
)  # fmt: skip
_TRACE = "Traceback (most recent call last):"


def message_of(error: Column) -> Column:
    """Return an error without the values that vary between tasks, so that equal failures have equal messages.

    Numbers, hexadecimal numbers, UUIDs and other long ids, quoted strings, paths, URLs, addresses and times are
    replaced by their kind, for example ``<number>``; a list of values of one kind is replaced once. Possible secrets
    (passwords, tokens and keys by name, credentials in a URL, authorization headers, JSON web tokens, keys of
    well-known forms) become ``<secret>``. A traceback is reduced to its errors, and a message to 300 characters. A
    missing or empty error becomes "(no error was given)".
    """
    text = fn.substring(fn.coalesce(error, fn.lit("")), 1, LIMITS.text)
    errors_alone = fn.regexp_replace(
        text, r"(?m)^(?:Traceback \(most recent call last\):|[ \t]).*$", ""
    )
    text = fn.when(fn.contains(text, fn.lit(_TRACE)), errors_alone).otherwise(text)
    text = fn.substring(fn.ltrim(text), 1, _LOOKED_AT)
    for pattern, kind in _RULES:
        text = fn.regexp_replace(text, pattern, kind)
    text = fn.rtrim(fn.substring(fn.trim(text), 1, _LONGEST))
    # Do not use `when` here, because it would evaluate the whole expression twice.
    return fn.regexp_replace(text, r"^\z", _NOTHING)


def fingerprint_of(message: Column) -> Column:
    """Return the fingerprint of a message: 16 hexadecimal digits, which depend only on the message."""
    return fn.substring(fn.sha2(message, 256), 1, 16)


def failures(transitions: DataFrame) -> DataFrame:
    """Return a row per failure and key, with failed attempts grouped by `message_of`.

    The section "Tables" of docs/pipeline.md describes the columns. Losses and redeliveries are not failures of a task;
    `throughput` counts them. A task with several lives counts as one task.
    """
    tasks = {
        "attempts": "count(*)", "dead": "max(dead)", "recovered": "max(recovered)", "first_seen": "min(ts)",
        "last_seen": "max(ts)",
    }  # fmt: skip
    totals = {
        "attempts": "sum(attempts)", "tasks": "count(*)", "dead": "count_if(dead)",
        "recovered": "count_if(recovered)", "first_seen": "min(first_seen)", "last_seen": "max(last_seen)",
        "samples": f"min_by(task_id, task_id, {SAMPLES})",
    }  # fmt: skip
    groups = (
        _failed(transitions)
        .groupBy("key", "message", "task_id")
        .agg(*(fn.expr(text).alias(name) for name, text in tasks.items()))
        .groupBy("key", "message")
        .agg(*(fn.expr(text).alias(name) for name, text in totals.items()))
    )
    return groups.select(
        fingerprint_of(fn.col("message")).alias("fingerprint"),
        "key",
        "message",
        "attempts",
        fn.expr("attempts / sum(attempts) over (partition by key) as share"),
        *(name for name in totals if name != "attempts"),
    )


def redrive_list(transitions: DataFrame, *fingerprints: str) -> DataFrame:
    """Return the dead letters that the given failures caused, each once: key, task_id.

    Without fingerprints, return all dead letters. The store may have fewer, because tasks may have been redriven after
    the last transition. Raises `InvalidInput` for an invalid fingerprint.
    """
    for fingerprint in fingerprints:
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise InvalidInput("fingerprint", kind_of(fingerprint), "16 hexadecimal digits")
    dead = _failed(transitions).where("dead")
    if fingerprints:
        dead = dead.where(fingerprint_of(fn.col("message")).isin(*fingerprints))
    return dead.select("key", "task_id").distinct()


def _failed(transitions: DataFrame) -> DataFrame:
    """Return the failed attempts, each once, with their ``message``.

    ``dead``: this attempt made the task a dead letter, and the task still is one; ``recovered``: the task was
    acknowledged later.
    """
    task = "partition by run, shard, key, task_id"
    events = "event in ('retried', 'dead_lettered', 'acked', 'redriven', 'discarded')"
    rows = (
        transitions.where(f"task_id != '' and {events}")
        .selectExpr("*", f"lag(seq) over ({task} order by seq) as before")
        .where("before is null or before != seq")
        .selectExpr(
            "*",
            f"max(if(event = 'acked', seq, null)) over ({task}) as acked_at",
            f"lead(seq) over ({task} order by seq) is null as last",
        )
        .where("event in ('retried', 'dead_lettered')")
    )
    text = fn.expr("coalesce(error, if(event = 'dead_lettered', reason, null))")
    return rows.select(
        "key",
        "task_id",
        "ts",
        message_of(text).alias("message"),
        fn.expr("event = 'dead_lettered' and last as dead"),
        fn.expr("coalesce(acked_at > seq, false) as recovered"),
    )
