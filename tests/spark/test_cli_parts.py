"""Tests of parts of ``taskqueue pipeline`` that need no Spark: progress output, tables and errors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import TaskContext
from rich.console import Console

from taskqueue_cli.output import console
from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_spark.cli import session
from taskqueue_spark.cli.output import print_table
from taskqueue_spark.cli.progress import Stages
from taskqueue_spark.cli.session import SparkFailed
from taskqueue_spark.sink.store import SparkStore
from tests.redis.conftest import MakeServer


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_is_reported_when_it_is_over(terminal: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """G10: each finished stage is reported in one line with its result.

    On a terminal a progress bar is shown before.
    """
    out = io.StringIO()
    stages = Stages(Console(file=out, force_terminal=terminal, width=100, color_system=None))
    stages.watch = lambda: (1, 4)
    with stages.stage("audit") as stage:
        stage.note = "7 rows"
    line = out.getvalue().splitlines()[-1]
    assert line[line.index("✔") :].split()[:4] == ["✔", "audit", "7", "rows"]


@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        (f"x\npyspark.Y: taskqueue_core.errors.{BackendUnavailable.__name__}: away\n  at z", "away", 4),
        (f"taskqueue_core.errors.{ConfigurationError.__name__}: no such thing", "no such thing", 2),
        ("taskqueue_core.errors.SomethingNew: odd", "odd", 1),
        ("boom\n at x\nCaused by: java.Error: disk\n at y", "Spark failed: Caused by: java.Error: disk", 4),
        ("first\nsecond", "Spark failed: first", 4),
        ("", "Spark failed: no reason given", 4),
    ],
)  # fmt: skip
def test_an_error_within_spark_is_one_line(text: str, said: str, code: int) -> None:
    """G10: an error inside Spark becomes one line.

    It is the message of a task queue error with its exit code, otherwise the cause or the first line, with exit code 4:
    1 would mean a loss.
    """
    error = session._error_of(text)
    assert (str(error), error.exit_code) == (said, code)


class PySparkLike(Exception):
    """An exception that looks like one of PySpark."""

    __module__ = "pyspark.errors.x"


def test_only_errors_of_spark_are_taken_for_such(tmp_path: Path) -> None:
    """G10: other exceptions are not converted, and if Spark does not start, the reason is taken from its log."""
    log = tmp_path / "log"
    with pytest.raises(ZeroDivisionError), session._failures(log):
        raise ZeroDivisionError
    with pytest.raises(SparkFailed, match="broken"), session._failures(log):
        raise PySparkLike("broken")
    log.write_text("WARNING: something\nError: no space\n")
    with pytest.raises(SparkFailed, match="no space"), session._failures(log):
        raise PySparkLike("[JAVA_GATEWAY_EXITED]")


def test_what_processes_say_goes_to_the_log(tmp_path: Path) -> None:
    """G10: standard error of child processes goes to the log file, and is restored afterwards."""
    log = tmp_path / "log"
    before = os.fstat(2).st_ino
    with session._quiet(log):
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'noise')"], check=True)
    assert log.read_text() == "noise"
    assert os.fstat(2).st_ino == before


def test_tables_show_hostile_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """G10: control characters and markup in table cells have no effect, and rows beyond the limit are counted."""
    rows = [
        {
            "key": "[red]\x1b[2J",
            "n": 1234,
            "at": datetime(2026, 1, 2, tzinfo=UTC),
            "x": None,
            "y": 0.25,
        }
    ] * 40
    print_table(rows, ("key", "n", "at", "x", "y"), of=100)
    out = capsys.readouterr().out
    assert "[red]\N{REPLACEMENT CHARACTER}[2J" in out
    assert "\x1b" not in out
    for words in ("1,234", "01-02 00:00:00", "0.25", "and 70 more"):
        assert words in out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_of_a_table_is_broken(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: on a narrow terminal the columns of a table are divided, and every number is on one line."""
    monkeypatch.setattr(console, "_width", width)
    names = ("queue_wait", "run", "acked_per_second", "published", "delivered", "completed", "lost")
    numbers = {name: 1_234_567_890 + index for index, name in enumerate(names)}
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    row = {"key": "a queue with a long name / " * 3, **numbers, "window_start": at}
    print_table([row] * 2, ("key", *names, "window_start"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for text in ("01-02 03:04:05", *(f"{number:,}" for number in numbers.values())):
        assert sum(text in line for line in lines) == 2, text


async def test_one_task_warns_about_the_servers(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: of the tasks of a Spark stage, only the first one logs that Redis does not keep its data."""
    warned = {}
    with make_server(aof=False) as server:
        for partition in (None, 0, 3):
            context = (
                None if partition is None else SimpleNamespace(partitionId=lambda n=partition: n)
            )
            monkeypatch.setattr(TaskContext, "get", lambda found=context: found)
            caplog.clear()
            async with SparkStore(url=server.url).opened() as backend:
                await backend.health()
            warned[partition] = "appendonly is off" in caplog.text
    assert warned == {None: True, 0: True, 3: False}
