"""Tests that the commands and code on the pipeline's pages work, and that the pages' tables match the code."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from taskqueue_cli import main
from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.options import NAMES as READING
from taskqueue_spark.pipeline.audit import ANOMALIES, VERDICTS
from taskqueue_spark.pipeline.history import RULES
from taskqueue_spark.sink.options import REDRIVE_OPTIONS, SINK_OPTIONS
from taskqueue_spark.sink.store import STORE_OPTIONS
from tests.redis.servers import RedisServer
from tests.spark.as_lines import lines_of
from tests.spark.synthetic import made

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipeline.md").read_text()
ELSEWHERE = {"audit", "load", "redrive", "report", "stream"}
"""commands that test_cli.py, test_cli_moving.py and test_connect.py run completely"""


def commands() -> list[str]:
    """Return the pipeline commands shown on the page."""
    return re.findall(r"^\$ taskqueue pipeline (.+)$", PAGE, re.MULTILINE)


def named(heading: str) -> list[str]:
    """Return the names in the first column of the first table after a heading."""
    lines = PAGE.split(f"{heading}\n", 1)[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| ---")) + 1
    found: list[str] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found += re.findall(r"`([^`]+)`", line.split("|")[1]) or [line.split("|")[1].strip()]
    return found


@pytest.fixture
def here(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    redis_server: RedisServer,
    redis_prefix: str,
) -> Path:
    """Prepare a folder with the files that the page mentions, and let commands use the tests' Spark session."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "redis")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("taskqueue_spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    (tmp_path / "journal.jsonl").write_bytes(
        b"".join(lines_of(made(1, 30, keys=1, shards=1).table))
    )
    rows = [json.dumps({"task_id": f"t{number}", "size": number}) for number in range(5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_commands(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command on the page is valid, and the code on the page works as shown (G8, G9, G10, G11)."""
    shown = {words.split()[0]: shlex.split(words) for words in commands()}
    assert len(shown) == len(commands())
    assert shown.keys() - ELSEWHERE == {"snapshot"}
    assert main(["pipeline", *shown["snapshot"]]) == 0, capsys.readouterr().err
    assert (here / "run/transitions").exists()

    def sound(*_: object, **__: object) -> None:
        raise ConfigurationError("it comes to where Spark starts")

    with monkeypatch.context() as patch:
        patch.setattr("taskqueue_spark.session.session", sound)
        for name in sorted(ELSEWHERE):
            assert main(["pipeline", *shown[name]]) == 2
            assert "it comes to where Spark starts" in capsys.readouterr().err, shown[name]
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    capsys.readouterr()
    # The Java of the tests was started in another folder, so the path must be absolute.
    snippet = snippets[0].replace("journal.jsonl", str(here / "journal.jsonl"))
    exec(compile(snippet, "pipeline.md", "exec"), {})  # noqa: S102 - the code comes from the page of this project
    assert "completed" in capsys.readouterr().out


def test_commands_of_the_other_page() -> None:
    """The page about clusters shows audit commands with --master or --remote, which other tests run (G12)."""
    shown = re.findall(r"^\$ (.+)$", (DOCS / "pipeline-scale.md").read_text(), re.MULTILINE)
    assert shown
    assert all(
        re.match(r"taskqueue pipeline audit .*(--master spark:|--remote sc:)", one) for one in shown
    )


def test_tables() -> None:
    """The options, columns, verdicts and rules listed on the page are those of the code (G8, G9)."""
    writing = {*SINK_OPTIONS, *REDRIVE_OPTIONS, *STORE_OPTIONS}
    for heading, there in {
        "### A transition": TRANSITIONS.names,
        "### Reading": READING,
        "### Writing": writing,
        "## What the audit says": VERDICTS,
        "| anomaly | |": ANOMALIES,
        "## What the history check looks for": RULES,
    }.items():
        told = named(heading)
        assert sorted(told) == sorted(there), heading
