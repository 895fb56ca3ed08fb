"""What commands print and log, on a terminal and elsewhere."""

import io
import json
import logging
import sys
from collections.abc import Callable

import pytest
from rich.live import Live
from rich.text import Text

from taskqueue_cli.output import SafeConsole, console, make_table, print_json
from taskqueue_core.logs import formatter
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


@pytest.mark.parametrize("renderable", ["text", "table", "live"])
def test_control_characters_are_escaped(renderable: str) -> None:
    """Fault K4: texts of tasks, such as errors and progress, cannot control the terminal, whatever shows them."""
    shown = SafeConsole(file=(out := io.StringIO()))
    text = Text("e\x1b[2J\x9b2J\u202e")
    table = make_table("name")
    table.add_row(text)
    if renderable == "live":
        with Live(table, console=shown, auto_refresh=False):
            pass
    else:
        shown.print(text if renderable == "text" else table)
    assert r"e\x1b[" in out.getvalue()
    assert not {"\x1b", "\x9b", "\u202e"} & {*out.getvalue()}


def test_json_has_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault K4: JSON output escapes the control characters that JSON allows, and means the same."""
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    print_json({"error": "\x1b[2J \x9b2J \x7f ü"})
    assert not {"\x1b", "\x9b", "\x7f"} & {*out.getvalue()}
    assert json.loads(out.getvalue()) == {"error": "\x1b[2J \x9b2J \x7f ü"}
