"""What commands print, and what they log, on a terminal and elsewhere."""

import io
import logging
import sys
from collections.abc import Callable

import pytest

from taskqueue_cli.output import console, print_json
from taskqueue_server.logs import formatter
from tests.cli.conftest import Cli


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_json_is_indented_only_for_people_and_only_if_long(
    stream: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program gets one line, a person too where it fits."""
    monkeypatch.setattr(console, "width", 80)
    monkeypatch.setattr(sys, "stdout", out := stream())
    print_json({"a": 1})
    assert out.getvalue() == '{"a":1}\n'
    print_json({"a": "x" * 100})
    assert out.getvalue().count("\n") == (4 if out.isatty() else 2)


def test_logs_for_people_are_short() -> None:
    """Time, level, message and fields, on one line and with nothing that acts on the terminal."""
    record = logging.makeLogRecord(
        {"name": "taskqueue.x", "levelname": "INFO", "msg": "hi\x1b[2J", "reason": "a\nb"}
    )
    line = formatter(for_people=True).format(record)
    assert line.split(" ", 1)[1] == r"info    hi\x1b[2J  reason=a\nb"


def test_a_position_is_printed_unless_it_is_the_first(cli: Cli) -> None:
    """Who is first in line needs no number."""
    assert "ahead of it" not in cli("publish", "k", "--id", "a").out
    assert "1 ahead of it" in cli("publish", "k", "--id", "b").out
