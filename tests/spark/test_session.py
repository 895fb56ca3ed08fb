"""Tests of creating Spark sessions."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.session import session
from taskqueue_spark.worker_daemon import LOADED


def test_a_session_counts_in_utc_and_lets_filters_through(spark: SparkSession) -> None:
    """A session uses UTC and has the settings that the data source needs (G8)."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.range(3).count() == 3


def test_a_master_and_a_remote_are_too_much() -> None:
    """A session with both a master and a remote is refused (G12)."""
    with pytest.raises(ConfigurationError, match="both are set"):
        session("tests", "local[2]", "sc://localhost")


def test_what_workers_begin_with_is_there() -> None:
    """The modules that Python workers preload exist (G8)."""
    assert all(find_spec(name) for name in LOADED)


def test_spark_finds_the_source_without_loading_much() -> None:
    """Importing the module through which Spark finds the data source loads neither Arrow nor a backend (G8)."""
    told = (
        "import sys, pyspark_taskqueue as found; print(found.DefaultSource.name());"
        "assert not {'pyarrow', 'pandas', 'taskqueue_redis', 'taskqueue_core'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "taskqueue"
