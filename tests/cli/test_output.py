"""What commands print and log, on a terminal and elsewhere."""

import io
import logging
import sys
from collections.abc import Callable

import pytest

from taskqueue_cli.output import console, print_json
from taskqueue_server.logs import formatter
from tests.cli.conftest import Cli


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_json_is_indented_only_for_people_and_only_if_long(
    stream: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON output is one line, except for long values on a terminal."""
    monkeypatch.setattr(console, "width", 80)
    monkeypatch.setattr(sys, "stdout", out := stream())
    print_json({"a": 1})
    assert out.getvalue() == '{"a":1}\n'
    print_json({"a": "x" * 100})
    assert out.getvalue().count("\n") == (4 if out.isatty() else 2)


def test_logs_for_people_are_short() -> None:
    """Log lines on a terminal contain time, level, message and fields in one line, without control characters."""
    record = logging.makeLogRecord(
        {"name": "taskqueue.x", "levelname": "INFO", "msg": "hi\x1b[2J", "reason": "a\nb"}
    )
    line = formatter(for_people=True).format(record)
    assert line.split(" ", 1)[1] == r"info    hi\x1b[2J  reason=a\nb"


def test_a_position_is_printed_unless_it_is_the_first(cli: Cli) -> None:
    """A publish prints the position of the task in the queue, unless the task is the first."""
    assert "already waiting" not in cli("publish", "k", "--id", "a").out
    assert "already waiting in the queue: 1" in cli("publish", "k", "--id", "b").out
