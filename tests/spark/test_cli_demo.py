"""Tests that the journal of the demo is kept after the demo has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from taskqueue_cli.backends import find_journal_keeper
from taskqueue_cli.demo.run import prepare_journal_file
from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.journal.keep import lines_of
from taskqueue_redis.journal.reader import JournalEntry


def test_a_job_on_a_redis_of_its_own_can_be_looked_into_afterwards(tmp_path: Path) -> None:
    """G10: after a demo with its own Redis, the journal file has every transition of the job without a gap."""
    files = tmp_path / "files"
    files.mkdir()
    for n in range(12):
        (files / str(n)).write_text("x" * n)
    journal = tmp_path / "kept/journal.jsonl"
    journal.parent.mkdir()
    journal.write_text("of another job")
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TASKQUEUE_")
    }
    words = ("demo", str(files), "--backend", "redis", "--journal", str(journal), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_cli", *words],
        capture_output=True,
        check=True,
        timeout=90,
        env=variables,
    )
    told = json.loads(done.stdout)
    assert told["journal"] == str(journal)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    events = Counter(line["event"] for line in lines)
    assert (events["published"], events["acked"], events["dead_lettered"]) == (13, 12, 1)
    assert (events["delivered"], events["retried"], events["lost"]) == (
        told["delivered"],
        told["retried"],
        told["lost"],
    )
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["key"] for line in lines} == {told["key"]}
    assert len({line["run"] for line in lines}) == 1
    assert journal.stat().st_mode & 0o077 == 0


def test_a_step_is_a_line_per_transition() -> None:
    """G10: a journal entry becomes one line per transition.

    Common values are repeated, empty ones are null, and times are in seconds.
    """
    head = [b"2", b"1700000000500000", b"published", b"k", b"waiting", b"", b""]
    columns = [b"a\0b", b"1", b"0", b"5\x003", b"t", b"", b"1700000001000000\0", b"", b""]
    first, second = lines_of(JournalEntry(7, head + columns, 2), "run.0", 3)
    assert (first["seq"], second["seq"]) == (4, 5)
    assert (first["task_id"], second["task_id"]) == ("a", "b")
    assert (first["priority"], second["priority"]) == (5, 3)
    assert (first["due_at"], second["due_at"]) == (1_700_000_001.0, None)
    assert (first["ts"], first["tenant"], first["worker"]) == (1_700_000_000.5, "t", None)
    assert first["run"] == second["run"] == "run.0"


def test_keepers_are_found_by_the_word_of_the_backend(tmp_path: Path) -> None:
    """G10: a backend without a journal has no journal keeper, and a path that cannot be written is reported at once."""
    keeper = find_journal_keeper("taskqueue_memory:create_backend")
    assert keeper is not None
    assert keeper.variables(tmp_path) == {"TASKQUEUE_MEMORY_JOURNAL": str(tmp_path)}
    assert find_journal_keeper("redis") is not None
    assert find_journal_keeper("somebody_elses") is None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        prepare_journal_file(tmp_path / "file/journal")
