"""Tests of the command ``taskqueue pipeline``, run in this process on the tests' Spark session."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from taskqueue_cli import main
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_spark.cli.options import PipelineOptions
from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.process import locked
from tests.cli.conftest import Cli, Done


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all settings of this machine from the environment."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a pipeline command and returns its exit code and output."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = main(["pipeline", *words])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def on_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use the tests' Spark session, and not stop it."""
    monkeypatch.setattr("taskqueue_spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)


async def _job(path: Path) -> None:
    """Write a journal of forty tasks: two fail for good with the same error, and one is cancelled."""
    clock = ManualClock()
    backend = MemoryBackend(settings=MemorySettings(journal=path), clock=clock)
    ids = [f"t{n:02}" for n in range(40)]
    await backend.publisher.publish(*(Task(id=name, key="k<b>", payload=b"1") for name in ids))
    await backend.control.cancel("k<b>", "t39")
    async with backend.subscribe(["k<b>"], "w") as taking:
        while deliveries := (await taking.receive(8, 0)).deliveries:
            await clock.advance(0.5)
            for delivery in deliveries:
                if delivery.task.id in {"t03", "t04"}:
                    await taking.dead_letter(
                        delivery, "rejected", error=f"ValueError: no {delivery.task.id} in 'x'"
                    )
                else:
                    await taking.ack(delivery)
    await backend.aclose()


def job(path: Path) -> Path:
    """Write the journal of `_job` and return its path."""
    asyncio.run(_job(path))
    return path


def doubled(journal: Path) -> None:
    """Repeat the last ack of a journal."""
    lines = journal.read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["event"] == "acked"
    journal.write_text("\n".join([*lines, json.dumps(last | {"seq": last["seq"] + 1}), ""]))


@pytest.mark.usefixtures("on_spark")
def test_from_a_journal_to_a_report(cli: Cli, tmp_path: Path) -> None:
    """G10: one command creates all tables and the report as HTML and JSON, and other commands read single tables.

    A doubled ack is found: it changes the verdict and the exit code (G9).
    """
    journal = job(tmp_path / "journal.jsonl")
    doubled(journal)
    done = cli("report", "--journal", str(journal), "--out", "out", "--key", "k<b>", "--json")
    assert done.code == 1, done.err
    assert done.json["verdict"]["kind"] == "violated"
    html = Path(done.json["html"]).read_text()
    told = json.loads(Path(done.json["json"]).read_text())
    (row,) = told["account"]["conservation"]
    assert (row["published"], row["completed"], row["dead_lettered"], row["cancelled"]) == (
        40,
        37,
        2,
        1,
    )
    assert told["account"]["anomalies"]["duplicate_ack"] == 1
    assert [one["rule"] for one in told["rules"]] == [f"R{number}" for number in range(14)]
    assert {one["rule"] for one in told["violations"]} == {
        one["rule"] for one in told["rules"] if one["count"]
    }
    assert "R4" in {one["rule"] for one in told["violations"]}
    assert sum(told["flow"]["all"]["published"]) == 40
    (failure,) = told["failures"]
    assert (failure["attempts"], failure["dead"], failure["samples"]) == (2, 2, ["t03", "t04"])
    assert f"redrive {failure['fingerprint']} --key &#39;k&lt;b&gt;&#39; --from out" in html
    assert "k<b>" not in html
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "transitions", "damaged", "audit", "conservation", "violations", "latency", "throughput", "fairness",
        "failures", "capacity",
    }  # fmt: skip

    done = cli("failures", "--from", "out", "--json")
    assert [one["fingerprint"] for one in done.json["rows"]] == [failure["fingerprint"]]
    done = cli("redrive", failure["fingerprint"], "--from", "out", "--dry-run", "--json")
    assert done.json == {"found": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit"], "no journal given"),
        (["audit", "--journal", "x", "--from", "y"], "more than one is set"),
        (["audit", "--from", "nowhere"], "there is no table named transitions"),
        (["audit", "--journal", "x", "--since", "yesterday"], "since"),
        (["audit", "--journal", "x", "--conf", "x"], "NAME=VALUE"),
        (["audit", "--journal", "x", "--master", "a", "--remote", "b"], "--master and --remote"),
        (["snapshot", "--journal", "x"], "--out DIR"),
        (["snapshot", "--journal", "x", "--out", "y", "--key", "z"], "every queue"),
        (["stream", "--journal", "x"], "--out DIR"),
        (["redrive", "--journal", "x"], "--all"),
        (["load", "x.txt"], "--format"),
        (["report", "--journal", "x", "--out", "a*b"], "without these characters"),
        (["report", "--journal", "x", "--out", "a", "--percentile", "95"], "percentile"),
        (["capacity", "--journal", "x", "--target-wait", "0"], "target_wait"),
        (["latency", "--journal", "x", "--window", "late"], "window"),
        (["fairness", "--journal", "x", "--window", "0 days"], "window"),
        (["audit", "--journal", "x", "--master", "spark://host:7077"], "--out DIR"),
        (["history", "--journal", "x", "--remote", "sc://host:15002"], "--out DIR"),
        (["failures", "--journal", "x", "--conf", "spark.master=yarn"], "--out DIR"),
    ],
)
def test_bad_arguments_are_refused_before_spark_starts(
    words: list[str], said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: wrong arguments give exit code 2 and one line that says what is wrong, before Spark starts."""
    monkeypatch.setattr("taskqueue_spark.session.session", None)
    done = cli(*words, "--json")
    assert done.code == 2, done.err
    assert said in done.json["error"]["detail"]
    assert done.err.count("\n") == 1


def test_a_folder_in_use_is_refused_before_spark_starts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: a second service on a folder ends with exit code 2 and one line, before Spark starts."""
    monkeypatch.setattr("taskqueue_spark.session.session", None)
    journal = tmp_path / "journal.jsonl"
    journal.touch()
    with locked(StreamOptions(out=tmp_path / "out")):
        done = cli("stream", "--journal", str(journal), "--out", "out", "--once", "--json")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "another service is using" in done.json["error"]["detail"]


def test_without_spark_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: without pyspark, a command prints one line that says what to install, and exits with code 2."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = cli("audit", "--journal", "x")
    assert done.code == 2
    assert (
        done.err == "error: the pipeline needs pyspark: pip install 'taskqueue-backends[spark]'\n"
    )


def test_times_are_read_as_people_say_them() -> None:
    """G10: a time is given as a duration before now or as a timestamp, which is in UTC by default."""
    for word, told in {
        "2026-11-30T12:00": "2026-11-30T12:00:00+00:00",
        "2026-11-30T12:00:05+02:00": "2026-11-30T12:00:05+02:00",
    }.items():
        since = PipelineOptions(since=word).start
        assert since is not None
        assert since.isoformat() == told
    late, early = PipelineOptions(since="1m").start, PipelineOptions(since="2h").start
    assert late is not None
    assert early is not None
    assert 7000 < (late - early).total_seconds() < 7200
