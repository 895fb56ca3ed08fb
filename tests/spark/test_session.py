"""Sessions: what the commands get, and what they are refused."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.session import session


def test_a_session_counts_in_utc_and_lets_filters_through(spark: SparkSession) -> None:
    """A session has what the source needs set (G8)."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.range(3).count() == 3


def test_a_master_and_a_remote_are_too_much() -> None:
    """It is one or the other (G12)."""
    with pytest.raises(ConfigurationError, match="both are set"):
        session("tests", "local[2]", "sc://localhost")
