"""The pages about the pipeline: their commands and their code work, and their tables are what the code has."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.cli import main
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.options import _NAMES as READING
from taskqueue_spark.pipeline.audit import ANOMALIES, VERDICTS
from taskqueue_spark.pipeline.history import RULES
from taskqueue_spark.sink.options import _NAMES as WRITING
from taskqueue_spark.sink.store import STORE_OPTIONS
from tests.redis.servers import RedisServer
from tests.spark.as_lines import lines_of
from tests.spark.synthetic import made

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipeline.md").read_text()
ELSEWHERE = {"audit", "report", "redrive"}
"""run by test_cli.py, which looks at what they say, too"""


def commands() -> list[str]:
    """Return the commands of the pipeline that the page shows."""
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
    """A folder with what the page speaks of, where commands use the session of the tests."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "redis")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("taskqueue_spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines_of(made(1, 60, shards=1).table)))
    rows = [json.dumps({"task_id": f"t{number}", "size": number}) for number in range(5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the page works as it shows it (G8, G9, G10, G11)."""
    shown = {words.split()[0]: words for words in commands()}
    assert len(shown) == len(commands())
    for name in sorted(shown.keys() - ELSEWHERE, reverse=True):
        words = shlex.split(shown[name])
        assert main(["pipeline", *words]) == 0, (words, capsys.readouterr().err)
    assert (here / "run/transitions").exists()
    assert (here / "archive/stream/status.json").exists()
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    capsys.readouterr()
    # The Java of the tests was started in another folder.
    snippet = snippets[0].replace("journal.jsonl", str(here / "journal.jsonl"))
    exec(compile(snippet, "pipeline.md", "exec"), {})  # noqa: S102 - the page's own code
    assert "completed" in capsys.readouterr().out


def test_commands_of_the_other_page() -> None:
    """The page about clusters shows commands that differ by where Spark runs, which other tests start (G12)."""
    shown = re.findall(r"^\$ (.+)$", (DOCS / "pipeline-scale.md").read_text(), re.MULTILINE)
    assert shown
    assert all(
        re.match(r"taskqueue pipeline audit .*(--master spark:|--remote sc:)", one) for one in shown
    )


def test_tables() -> None:
    """Options, columns, verdicts and rules in the page are those there are (G8, G9)."""
    writing = {name for names in WRITING.values() for name in names} | {*STORE_OPTIONS}
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
