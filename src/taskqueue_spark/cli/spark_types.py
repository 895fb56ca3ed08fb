"""Types of Spark for annotations. At run time they are `Any`, because Spark is slow to import and may be missing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from taskqueue_spark.report.build import ReportBuild
else:
    DataFrame = SparkSession = ReportBuild = Any

__all__ = ["DataFrame", "ReportBuild", "SparkSession"]
