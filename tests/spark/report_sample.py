"""Sample data for a report: two queues, with every kind of finding and with names that contain HTML."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from taskqueue_spark.pipeline.audit import VERDICTS
from taskqueue_spark.report.outcome import COUNTED, outcome_of

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(2)></style></title>"
START = datetime(2026, 11, 21, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def conserved(key: str, **counts: Any) -> dict[str, Any]:
    """Return a row of the conservation table."""
    row = {"key": key, **dict.fromkeys(("published", "earlier", *VERDICTS), 0)}
    return row | {"balanced": True, "complete": True} | counts


def total(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return the sums over rows of the conservation table."""
    counts = {name: sum(row[name] for row in rows) for name in COUNTED}
    told = {name: all(row[name] for row in rows) for name in ("balanced", "complete")}
    return {"queues": len(rows)} | counts | told


def sample(**changes: Any) -> dict[str, Any]:
    """Return the data of a report; ``changes`` replace some of its parts."""
    conservation = [
        conserved(
            EVIL, published=1300, completed=1290, dead_lettered=5, lost=2, unknown=3, complete=False
        ),
        conserved("mail", published=40, completed=38, in_flight=2),
    ]
    rules = [{"rule": f"R{number}", "count": 2 * (number == 3)} for number in range(14)]
    anomalies = {"conflict": 2, "orphan": 0}
    series = {
        "published": [30, 0, 10, 0, 5], "completed": [10, 20, 5, 5, 5], "failed": [0, 1, 0, 0, 0],
        "redelivered": [0] * 5, "backlog": [20, 0, 5, 0, 0],
    }  # fmt: skip
    told = {
        "report": 1,
        "made_at": START,
        "source": f"lines of {EVIL}",
        "where": "--from here",
        "verdict": msgspec.to_builtins(
            outcome_of(total(*conservation), rules=rules, anomalies=anomalies, gaps=7, damaged=1)
        ),
        "extent": {
            "since": START, "until": START + 5 * MINUTE, "seconds": 300.0, "transitions": 4321, "runs": 1, "workers": 3,
        },
        "figures": {"executions": 80, "wait_p95": 0.8, "run_p95": 0.8, "again": 4, "failed": 9, "peak": 8},
        "account": {
            "total": total(*conservation), "conservation": conservation,
            "anomalies": anomalies, "missing": 7, "damaged": 1, "asked": True,
            "lost": [
                {"key": EVIL, "task_id": EVIL, "life": 1, "reason": "not in the store", "last_event": "delivered",
                 "last_at": START},
            ],
            "gaps": [{"run": EVIL, "shard": 0, "first": 1, "last": 7, "missing": 7}],
            "ledgers": [{"key": EVIL, "ledger_published": 1302, "more_published": 2, "agrees": False}],
        },
        "rules": rules,
        "violations": [
            {"rule": "R3", "key": EVIL, "task_id": EVIL, "run": "r", "shard": 0, "seq": 9, "text": EVIL},
        ],
        "flow": {
            "seconds": 60, "start": START, "windows": 5, "all": series,
            "keys": [{"key": key, **series} for key in (EVIL, "mail")],
        },
        "throughput": [{"key": EVIL, "lost": 3, "redelivered": 1}],
        "latency": [_latency(EVIL, 0.4), _latency("mail", None)],
        "latency_over_time": [
            _latency(EVIL, 0.1 * place) | {"window_start": START + place * MINUTE} for place in (0, 1, 3, 4)
        ],
        "window": "60 seconds",
        "classes": [_latency(EVIL, 0.4) | {"priority": 5, "tenant": tenant} for tenant in (EVIL, None, "a")],
        "concurrency": [
            {"key": EVIL, "worker": worker, "executions": 99, "peak": 8, "mean": 5.5, "p99": 7}
            for worker in (None, EVIL)
        ],
        "fairness": [
            {"key": EVIL, "by": "tenant", "windows": 3, "jain": 0.9, "jain_lowest": 0.5, "members": 2, "deliveries": 30,
             "jain_total": 0.8, "shares_total": [],
             "shares": [{"member": member, "deliveries": 15, "share": 0.5} for member in (EVIL, "")]},
        ],
        "failures": [
            {"fingerprint": "0" * 16, "key": EVIL, "message": EVIL, "attempts": 9, "share": 1.0, "tasks": 4, "dead": 2,
             "recovered": 2, "first_seen": START, "last_seen": START, "samples": [EVIL]},
        ],
        "capacity": [_advice(EVIL), _advice("mail") | {"reason": EVIL}],
        "target": {"wait": 1.0, "percentile": 0.95},
    }  # fmt: skip
    return told | changes


def _latency(key: str, base: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"key": key, "priority": None, "tenant": None, "window_start": None}
    row |= {"tasks": 40, "deliveries": 40, "executions": 40}
    for what in ("queue_wait", "run", "end_to_end"):
        for number, name in enumerate(("p50", "p95", "p99", "max"), start=1):
            row[f"{what}_{name}"] = None if base is None else base * number
    return row


def _advice(key: str) -> dict[str, Any]:
    return {
        "key": key, "reason": None, "slots": 12, "max_inflight": 12, "workers": 3, "slots_per_worker": 4,
        "percentile": 0.95, "expected_wait": 0.8, "expected_low": 0.7, "expected_high": 0.9, "utilisation": 0.7,
        "arrival_rate": 20.0, "peak_rate": 60.0, "service_mean": 0.3, "max_tokens": 400, "interval": 10,
    }  # fmt: skip
