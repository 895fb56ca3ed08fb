"""The kit on a backend whose processes share one SQLite file, without a mistake and with each of many."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from taskqueue_conformance import BackendSuite, Bench
from taskqueue_core.backend import Backend
from tests.conformance.shared_sqlite import open_shared
from tests.conformance.shared_suite import OnSharedFile

MISTAKES = {
    "1 ms early": "test_scheduled_not_a_millisecond_early",
    "0.2 s early": "test_retry_not_a_millisecond_early",
    "the dead stay": "test_killed_process_loses_its_deliveries",
    "no sign of life": "test_living_process_keeps_its_deliveries",
    "no wake-up between processes": "test_publish_wakes_another_process",
    "counters in a second transaction": "test_settlement_that_fails_changes_nothing",
    "candidates before the lock": "test_race_of_processes",
    "wrong error of a commit": "test_publish_without_an_answer",
    "commit for a rollback": "test_publish_that_fails_stores_nothing",
    "own owner numbers": "test_close_releases_its_own",
    "own settings": "test_changed_settings_reach_every_replica",
    "own positions": "test_order_across",
    "own workers": "test_one_view_for_operators",
    "own hints": "test_seen_by_all",
    "own bucket": "test_tokens_on_every_replica",
    "own room signals": "test_notifies_across_replicas",
    "takes back at opening": "test_opening_disturbs_nothing",
    "keeps the ended": "test_nothing_remains_of_the_ended",
    "no index": "test_tasks_of_other_keys_cost_nothing",
    "polls": "test_waiting_takes_no_time",
}
"""each mistake, and a test that finds it"""


class Suite(OnSharedFile, BackendSuite):
    """The whole kit, with short times to wait for what a mistake prevents."""

    __test__ = False
    patience = 2.0
    silence = 4.0


class TestShared(OnSharedFile, BackendSuite):
    """The whole kit on the backend without a mistake."""

    max_examples = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "25"))

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    """A backend with one mistake fails the test of the promise that it breaks."""
    suite = Suite()
    suite.folder, suite.mistakes = tmp_path, (mistake,)
    with asyncio.Runner() as runner:
        failed = runner.run(_fails(suite, MISTAKES[mistake]))
    assert failed, f"{MISTAKES[mistake]} passes with the mistake {mistake!r}"


async def _fails(suite: Suite, name: str) -> bool:
    try:
        async with Bench.opened(suite) as bench:
            await getattr(suite, name)(bench)
    except (AssertionError, pytest.fail.Exception):
        return True
    return False


class Unopened(Suite):
    """A class whose backend cannot be opened in another process."""

    __test__ = False

    def opener(self, backend: Backend) -> Callable[[], Backend]:  # noqa: ARG002 - the folder names the file
        """Return a function that opens a file in a folder that does not exist."""
        return partial(open_shared, self.folder / "missing" / "shared.db")


class Unsent(Suite):
    """A class whose function cannot be sent to another process."""

    __test__ = False

    def opener(self, backend: Backend) -> Callable[[], Backend]:
        """Return a local function."""
        return lambda: backend


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Unopened, "unable to open database file"),
        (Unsent, "must return a function that a module defines"),
    ],
)
async def test_failure_of_another_process_is_shown(
    kind: type[Suite], text: str, tmp_path: Path
) -> None:
    """A test whose other process fails says why, or what ``opener`` must return (G6)."""
    suite = kind()
    suite.folder = tmp_path
    async with Bench.opened(suite) as bench:
        with pytest.raises(pytest.fail.Exception, match=text):
            await suite.test_killed_process_loses_its_deliveries(bench)


def test_guide_lists_the_mistakes() -> None:
    """docs/writing-a-backend.md lists each of these mistakes with the test that finds it."""
    page = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
    assert dict(re.findall(r"^\| (.+) \| .+ \| `(test_\w+)` \|$", page, re.MULTILINE)) == MISTAKES
