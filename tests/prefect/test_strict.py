"""Tests that a server logs which queue it uses, and in strict mode does not start with another one."""

from __future__ import annotations

import subprocess

import pytest

from tests.prefect import table
from tests.prefect.environment import MIDDLE, OLDEST, OTHER, PROGRAMS, other_prefect
from tests.prefect.replicas import Site

LEANED_ON = [
    "api.server.create_app",
    "api.task_runs.scheduled_task_subscription",
    "database.dependencies.provide_database_interface",
    "database.interface.PrefectDBInterface.TaskRun",
    "database.interface.PrefectDBInterface.TaskRunState",
    "database.interface.PrefectDBInterface.session_context",
    "database.orm_models.Base",
    "database.orm_models.Run",
    "database.orm_models.TaskRun",
    "database.orm_models.TaskRunState",
    "models.task_run_states.read_task_run_states",
    "models.task_runs.read_task_run",
    "models.task_runs.set_task_run_state",
    "models.task_workers",
    "orchestration.core_policy.BackgroundTaskPolicy",
    "orchestration.core_policy.CoreTaskPolicy",
    "orchestration.core_policy.CopyScheduledTime",
    "orchestration.core_policy.CopyTaskParametersID",
    "orchestration.core_policy.EnqueueScheduledTasks",
    "orchestration.core_policy.PreventPendingTransitions",
    "orchestration.core_policy.RetryFailedTasks",
    "schemas.core.TaskRun",
    "schemas.responses.SetStateStatus",
    "schemas.states.State",
    "schemas.states.StateDetails",
    "schemas.states.StateType",
    "task_queue",
    "utilities.database.JSON",
    "utilities.subscriptions.still_connected",
]
"""parts of ``prefect.server`` that the plugin replaces, calls or reads"""
OURS, STOCK = "taskqueue_prefect.task_queue", "prefect.server.task_queue"


def served(site: Site, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Start Prefect's server application in a process, and end it."""
    return subprocess.run(
        [site.python, str(PROGRAMS / "serve_once.py"), *words],
        env=site.environment("once", **site.settings | settings),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def of_version(site: Site, version: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Start the server application of another version of Prefect, and end it."""
    own = site.environment("once")["PYTHONPATH"]
    return served(site, PYTHONPATH=f"{other_prefect(version)}:{own}", **settings)


@pytest.mark.parametrize("version", [OLDEST, MIDDLE, OTHER])
def test_plugins_of_a_release(site: Site, version: str) -> None:
    """Rows E8, U26: with every release a strict server without plugins does not start.

    Releases before 3.7 ignore ``PREFECT_PLUGINS_ENABLED``.
    """
    done = of_version(
        site, version, TASKQUEUE_PREFECT_STRICT="true", PREFECT_PLUGINS_ENABLED="false"
    )
    assert done.returncode != 0
    assert STOCK not in done.stdout


def test_an_invalid_setting_of_an_old_release(site: Site) -> None:
    """Row U26: before 3.7 a strict server whose settings are invalid does not start."""
    done = of_version(
        site, OLDEST, TASKQUEUE_PREFECT_STRICT="true", TASKQUEUE_PREFECT_CAPACITY="nonsense"
    )
    assert done.returncode != 0
    assert STOCK not in done.stdout


@pytest.mark.parametrize("version", [OLDEST, MIDDLE, OTHER])
def test_the_page_names_the_releases(version: str) -> None:
    """Row U26: the page has a column for each release that is tested, and no test of them failed."""
    part = table.PAGE.read_text().split(table.BEGIN)[1].split(table.END)[0]
    assert version in part
    assert part.count("passed") == 3 * len(table.TRIED)


def test_code_that_is_not_known(site: Site) -> None:
    """Rows E8, U26, D5: if Prefect's code differs from the supported one, an error is logged for each part.

    A strict server does not start.
    """
    done = served(site, "odd")
    assert done.returncode == 0, done.stderr[-2000:]
    refused, queue = done.stdout.splitlines()[-2:]
    assert refused.startswith("TASKQUEUE_PREFECT_STRICT is true, but ")
    assert queue == OURS
    for text in refused, done.stderr:
        missing = [name for name in LEANED_ON if f"prefect.server.{name} differs from" not in text]
        assert not missing


@pytest.mark.long
def test_plugins_that_are_not_enabled(site: Site) -> None:
    """Row E8: a server without the plugin logs how to enable it; `test_plugins_of_a_release` has strict ones."""
    done = served(site, PREFECT_PLUGINS_ENABLED="false")
    assert "set PREFECT_PLUGINS_ENABLED=true" in done.stderr
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, STOCK)


@pytest.mark.long
def test_without_a_backend_nothing_is_changed(site: Site) -> None:
    """Row E4: without a backend Prefect's own queue is used silently. Plugins may be enabled for other reasons."""
    done = served(site, TASKQUEUE_BACKEND="", TASKQUEUE_PREFECT_STRICT="true")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, STOCK), done.stderr[-2000:]
    assert "taskqueue" not in done.stderr
