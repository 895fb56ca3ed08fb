"""docs/metrics.md, the alert rules and the example configurations agree with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families as families

from taskqueue_core.logs import FIELDS
from taskqueue_server.api import table
from taskqueue_server.api.queues import ScalingOut
from tests.server.support import http, running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text("utf-8")
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text("utf-8"))
ROW = re.compile(r"^\| `(taskqueue_\w+)` \| (\w+) \|(.*)\| (.+) \|$", re.MULTILINE)
METRICS = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)), text)
    for name, kind, labels, text in ROW.findall(PAGE)
}
KEDA = {
    *("url", "valueLocation", "targetValue", "activationTargetValue", "unsafeSsl", "format"),
    *("authMode", "method", "keyParamName"),
}
"""Trigger settings that KEDA's metrics-api scaler accepts."""


def snippets(language: str) -> list[str]:
    """Return the code blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def check(expression: str) -> None:
    """Check that every metric in a PromQL expression exists and has the labels that the expression uses."""
    found = re.findall(r"(taskqueue_\w+)(?:\{([^}]*)\})?", expression)
    assert found
    for name, selector in found:
        plain = name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)
        kind, labels, _ = METRICS[plain]
        assert name == plain or kind == "histogram"
        assert labels.issuperset(re.findall(r"(\w+)=", selector))
    by = re.findall(r"by \(([\w, ]+)\)", expression)
    own = {"instance", "le"}.union(*(METRICS[name][1] for name, _ in found if name in METRICS))
    own.update(
        *(METRICS[re.sub(r"_[a-z]+$", "", name)][1] for name, _ in found if "_bucket" in name)
    )
    if not any(name.endswith("_count") for name, _ in found):
        assert own.issuperset(", ".join(by).split(", ") if by else ()), expression
    assert expression.count("(") == expression.count(")")


async def test_the_table_is_what_is_exposed() -> None:
    """Security 16: the table on the page lists exactly the exposed metrics, with kind, help text and labels."""
    async with running() as it, http(it) as client:
        await it.publish("a")
        await client.get("/v1/queues")
        answer = await client.get("/metrics")
    exposed = {
        (f"{family.name}_total" if family.type == "counter" else family.name): family
        for family in families(answer.text)
        if not family.name.startswith("process_")
    }
    assert set(exposed) == set(METRICS)
    for name, family in exposed.items():
        kind, labels, text = METRICS[name]
        assert (family.type, family.documentation) == (kind, text)
        assert re.fullmatch(r"taskqueue_[a-z_]+", name)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name


def test_alerts() -> None:
    """Each alert rule uses existing metrics and has a summary, and the page quotes the rules unchanged."""
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    assert {"TaskqueueLedgerImbalance", "TaskqueueStoreDown", "TaskqueueNoSubscriber"} < set(rules)
    assert "TaskqueueOldestTask" in rules
    for rule in rules.values():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]
        if "taskqueue_" in rule["expr"]:
            check(rule["expr"])
    (quoted,) = (text for text in snippets("yaml") if "- alert:" in text)
    for quote in yaml.safe_load(quoted):
        assert quote["expr"] == rules[quote["alert"]]["expr"]


def test_questions() -> None:
    """The PromQL queries on the page use existing metrics."""
    (queries,) = snippets("promql")
    lines = [line for line in queries.splitlines() if not line.startswith("#")]
    assert len(lines) == 4
    for line in lines:
        check(line)


def test_the_scrape_configuration() -> None:
    """The scrape configuration on the page loads the alert rules and reads the token from a file."""
    (text,) = (text for text in snippets("yaml") if "scrape_configs" in text)
    told = yaml.safe_load(text)
    (job,) = told["scrape_configs"]
    assert set(job) == {"job_name", "authorization", "static_configs"}
    assert f'up{{job="{job["job_name"]}"}}' in ALERTS["groups"][0]["rules"][0]["expr"]
    assert set(job["authorization"]) == {"credentials_file"}
    assert told["rule_files"] == ["alerts.yaml"]


def test_the_scaled_object() -> None:
    """The trigger of the ScaledObject is valid for KEDA's metrics-api scaler.

    It queries an operation and a field that exist.
    """
    (text,) = (text for text in snippets("yaml") if "ScaledObject" in text)
    scaled, authentication = yaml.safe_load_all(text)
    for one in (scaled, authentication):
        assert one["apiVersion"] == "keda.sh/v1alpha1"
    spec: dict[str, Any] = scaled["spec"]
    assert set(spec) == {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"}
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "metrics-api"
    told = trigger["metadata"]
    assert set(told) <= KEDA
    assert {"url", "valueLocation", "targetValue"} <= set(told)
    assert all(isinstance(value, str) for value in told.values())
    url = urlsplit(told["url"])
    (operation,) = [row for row in table.OPERATIONS if row.id == "scaling_scaling"]
    assert operation in table.OPERATIONS
    assert re.fullmatch(operation.path.replace("{key}", r"[\w-]+"), url.path)
    assert set(parse_qs(url.query)) <= {query.name for query in operation.query}
    assert told["valueLocation"] in ScalingOut.__struct_fields__
    assert told["authMode"] == "bearer"
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    assert [ref["parameter"] for ref in authentication["spec"]["secretTargetRef"]] == ["token"]


def test_examples_in_json() -> None:
    """The JSON examples on the page have the fields of the scaling response and of the log."""
    answer, line = snippets("json")
    assert list(json.loads(answer)) == ["key", *ScalingOut.__struct_fields__[1:]]
    msgspec.json.decode(answer, type=ScalingOut)
    assert set(json.loads(line)) - {"timestamp", "level", "logger", "event"} <= FIELDS


def test_the_tracing_example() -> None:
    """The tracing example on the page compiles."""
    (program,) = snippets("python")
    compile(program, "tracing.py", "exec")
