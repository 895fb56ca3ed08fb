"""Which failures repeat: errors that differ in what they quote alone are one failure."""

from __future__ import annotations

import re

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of

SAMPLES = 5
_LONGEST = 300
_LOOKED_AT = 1000
"""characters of an error; what comes later would not be shown, and may differ between errors that begin the same"""
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_NOTHING = "(no error was told)"
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

# Regular expressions of Java's, in this order. Java repeats a group by recursion, and who overflows the stack takes
# the executor down: what is repeated without a bound is a set of characters, never a group.
_RULES = (
    # Secrets first: whatever else a message may say, these go.
    (r"-----BEGIN [^-]{1,64}-----[^-]*(?:-----END [^-]{1,64}-----)?", "<secret>"),
    (r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(\W{0,3}[:=])[^\r\n]+", "$1$2 <secret>"),
    (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", "$1 <secret>"),
    (r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_.-]+", "<secret>"),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b", "<secret>"),
    (r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs])[-_][A-Za-z0-9_-]{8,}", "<secret>"),
    (r"[A-Za-z][A-Za-z0-9+.-]{0,15}://\S+", "<url>"),  # with the user and the password in it
    (_NAMED_SECRET, "$1<secret>"),
    # What differs from task to task.
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
    (r"(?<=<(number|text|hex|id|time|address|path)>)[,;]? ?<\1>", ""),  # lists of any length
    (r"\s+", " "),
)  # fmt: skip
_TRACE = "Traceback (most recent call last):"


def message_of(error: Column) -> Column:
    """Return what errors have in common that differ in what they quote alone: at most 300 characters.

    Numbers, hexadecimal numbers, UUIDs and other long ids, quoted strings, paths, URLs, addresses and times
    are replaced by their kind, as ``<number>``; lists of them by one. What looks like a secret (a password, a
    token, a key by name, credentials in a URL, a header of authorization, a JSON web token, keys of
    well-known forms) becomes ``<secret>``: a message may be shown. Of a traceback its errors are kept. An
    error that was not told, or is empty, is "(no error was told)".
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
    # and not by `when`, which would do it all twice
    return fn.regexp_replace(text, r"^\z", _NOTHING)


def fingerprint_of(message: Column) -> Column:
    """Return what names a message: 16 hexadecimal digits, the same wherever and whenever it occurs."""
    return fn.substring(fn.sha2(message, 256), 1, 16)


def failures(transitions: DataFrame) -> DataFrame:
    """Return a row per failure and key, where attempts that failed are brought together by `message_of`.

    An attempt failed where it was retried or dead-lettered, whoever decided so. The error is the text that
    came with the attempt's end; of a dead letter without one its reason. Columns:

    - ``fingerprint`` (of the message alone), ``key``, ``message``;
    - ``attempts`` that failed so, ``tasks`` of which they were; of these tasks ``dead``, which lie among the
      dead letters now because of it, and ``recovered``, which were acked after it; ``share`` of the key's
      failed attempts;
    - ``first_seen``, ``last_seen``, and ``samples``: the ids of up to five tasks, the first by name, so
      always the same.

    Losses and redeliveries are no failures of the task; `throughput` counts them. A task is one (key, id), in
    all its lives.
    """
    failed = _failed(transitions)
    tasks = failed.groupBy("key", "message", "task_id").agg(
        fn.count("*").alias("attempts"),
        fn.max("dead").alias("dead"),
        fn.max("recovered").alias("recovered"),
        fn.min("ts").alias("first_seen"),
        fn.max("ts").alias("last_seen"),
    )
    groups = tasks.groupBy("key", "message").agg(
        fn.sum("attempts").alias("attempts"),
        fn.count("*").alias("tasks"),
        fn.count_if("dead").alias("dead"),
        fn.count_if("recovered").alias("recovered"),
        fn.min("first_seen").alias("first_seen"),
        fn.max("last_seen").alias("last_seen"),
        fn.min_by("task_id", "task_id", SAMPLES).alias("samples"),
    )
    of_key = fn.sum("attempts").over(Window.partitionBy("key"))
    return groups.select(
        fingerprint_of(fn.col("message")).alias("fingerprint"),
        "key",
        "message",
        "attempts",
        (fn.col("attempts") / of_key).alias("share"),
        "tasks",
        "dead",
        "recovered",
        "first_seen",
        "last_seen",
        "samples",
    )


def redrive_list(transitions: DataFrame, *fingerprints: str) -> DataFrame:
    """Return which tasks lie among the dead letters because of these failures, once each: key, task_id.

    Without fingerprints: because of any. The store's own list has the last word, as somebody may redrive
    meanwhile. Raises `InvalidInput` for what is no fingerprint.
    """
    for fingerprint in fingerprints:
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise InvalidInput("fingerprint", kind_of(fingerprint), "16 hexadecimal digits")
    dead = _failed(transitions).where("dead")
    if fingerprints:
        dead = dead.where(fingerprint_of(fn.col("message")).isin(*fingerprints))
    return dead.select("key", "task_id").distinct()


def _failed(transitions: DataFrame) -> DataFrame:
    """Return the failed attempts, each once: key, task_id, ts, message, ``dead`` of it, ``recovered`` from it."""
    result = transitions.where(
        (fn.col("task_id") != "")
        & fn.col("event").isin("retried", "dead_lettered", "acked", "redriven", "discarded")
    ).select("run", "shard", "key", "task_id", "seq", "ts", "event", "error", "reason")
    task = Window.partitionBy("run", "shard", "key", "task_id")
    order = task.orderBy("seq")
    event, seq = fn.col("event"), fn.col("seq")
    rows = (
        result.withColumn("before", fn.lag("seq").over(order))
        .where(fn.col("before").isNull() | (fn.col("before") != seq))
        .withColumns(
            {
                "acked_at": fn.max(fn.when(event == "acked", seq)).over(task),
                "last": fn.lead("seq").over(order).isNull(),
            }
        )
        .where(event.isin("retried", "dead_lettered"))
    )
    dead = event == "dead_lettered"
    text = fn.coalesce("error", fn.when(dead, fn.col("reason")))
    return rows.select(
        "key",
        "task_id",
        "ts",
        message_of(text).alias("message"),
        (dead & fn.col("last")).alias("dead"),
        fn.coalesce(fn.col("acked_at") > seq, fn.lit(col=False)).alias("recovered"),
    )
