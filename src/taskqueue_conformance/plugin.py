"""The pytest plugin of the kit. It collects the tests that apply to a backend, and explains their failures.

``-m conformance`` selects the tests of the kit. A failure shows the law, the expected value and the actual value.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Generator
from importlib import import_module
from typing import Any

import pytest

_KIT = "taskqueue_conformance"
PARTS = (
    "bench",
    "declared",
    "harness",
    "histories",
    "model",
    "partitions",
    "processes",
    "slots",
    "suites",
)
"""modules and folders of the kit whose assertions pytest rewrites"""

pytest.register_assert_rewrite(*(f"{_KIT}.{part}" for part in PARTS))

_counted = pytest.StashKey[dict[str, Counter[str]]]()
"""for the node id of each test class: number of tests left out, by missing need; under ``""``, number that apply"""
_lines = pytest.StashKey[list[str]]()
"""lines of the summary at the end of the run"""
_explained = pytest.StashKey[bool]()
"""whether the running test belongs to the kit, so that its failure is explained"""
_SHORT = 300
"""maximum length, in characters, of a comparison that is shown on one line"""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``conformance``, and prepare the counts for the summary."""
    config.addinivalue_line(
        "markers", "conformance: proves a backend's promise (taskqueue_conformance)"
    )
    config.stash[_counted] = {}
    config.stash[_lines] = []
    config.stash[_explained] = False


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Count a test of the kit, and leave the test out if its class does not declare what the test needs."""
    if not (_of_the_kit(collector.obj) and collector.funcnamefilter(name)):
        return None
    selection = import_module("taskqueue_conformance.selection")
    lacking = selection.missing(collector.obj, obj)
    counts = collector.config.stash[_counted].setdefault(collector.nodeid, Counter())
    counts["" if lacking is None else str(lacking)] += 1
    return None if lacking is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker ``conformance`` to the tests of the kit."""
    for item in items:
        if _of_the_kit(getattr(item, "cls", None)):
            item.add_marker("conformance")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare a summary line for each class that is run. It says how many tests apply, and how many were left out."""
    run = {item.parent.nodeid for item in session.items if item.parent}
    for name, counts in session.config.stash[_counted].items():
        if name in run:
            session.config.stash[_lines].append(_line(name, counts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """If a test of the kit fails, add to its error the law that the backend breaks."""
    of_the_kit = _of_the_kit(getattr(item, "cls", None)) and isinstance(item, pytest.Function)
    item.config.stash[_explained] = of_the_kit
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        if of_the_kit:
            _explain(error, broken_law(item.function))  # type: ignore[attr-defined] # a Function
        raise
    finally:
        item.config.stash[_explained] = False


def pytest_assertrepr_compare(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    """Show a short comparison in a test of the kit as one line: the expected value, then the actual value."""
    line = f"expected {right!r}, got {left!r}"
    if config.stash[_explained] and op in ("==", "is") and len(line) <= _SHORT:
        return [line]
    return None


def broken_law(test: object) -> str:
    """Return the law numbers and the promise that a test of the kit checks. Both are read from its docstring."""
    text = " ".join((inspect.getdoc(test) or "").split())
    numbers = [n for part in re.findall(r"[Ll]aws? ([\d, ]*\d)", text) for n in part.split(", ")]
    promise = re.sub(r" \([^()]*\b(?:laws? \d|[A-Z]+-?[A-Z]?\d)[^()]*\)", "", text)
    law = f"law{'s' if numbers[1:] else ''} {' and '.join(numbers)}" if numbers else "contract"
    return f"{law} (docs/laws.md): {promise}"


def _explain(error: BaseException, law: str) -> None:
    if isinstance(error, AssertionError):
        message = str(error).replace("assert expected ", "expected ")
        error.args = (f"{law}\n{message}",)
    elif isinstance(error, pytest.fail.Exception):
        error.msg = f"{law}\n{error.msg}"
    else:
        error.add_note(law)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the summary lines from a worker process of pytest-xdist to the process that prints them."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KIT] = session.config.stash[_lines]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the summary lines of a pytest-xdist worker.

    All workers send the same lines, because each worker collects all tests.
    """
    result = getattr(node, "workeroutput", {}).get(_KIT, [])
    node.config.stash[_lines] = result or node.config.stash[_lines]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests of the kit apply to each backend, and why the other tests do not apply."""
    if lines := terminalreporter.config.stash[_lines]:
        terminalreporter.section("conformance: tests that apply to each backend")
        for line in lines:
            terminalreporter.write_line(line)


def _of_the_kit(cls: object) -> bool:
    return getattr(cls, "__taskqueue_conformance__", False) is True


def _line(name: str, counts: Counter[str]) -> str:
    left_out = {need: number for need, number in counts.most_common() if need}
    line = f"{name}: {counts['']} of {counts.total()}"
    if not left_out:
        return line
    why = ", ".join(f"{need} ({number})" for need, number in left_out.items())
    return f"{line}; left out, because the class does not declare: {why}"
