"""The Spark session of a command. Its output is hidden, its progress is shown, and it stops with the command."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from taskqueue_cli.output import SafeConsole, exit_code
from taskqueue_core import errors
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_spark.cli.options import EngineOptions
from taskqueue_spark.cli.progress import Done, Stages
from taskqueue_spark.cli.spark_types import SparkSession

_EXTRA = {
    "google", "grpc", "hiredis", "jinja2", "numpy", "pandas", "py4j", "pyarrow", "pyspark", "redis",
}  # fmt: skip
_OURS = re.compile(r"taskqueue_core\.errors\.([A-Za-z]+): ([^\n]*)")
_ASIDE = ("WARN", "Using ", "Setting ", "To adjust ")
"""beginnings of lines that Spark prints at every start; these lines do not describe an error"""
_LOG_END = 20_000


class SparkFailed(TaskQueueError):
    """Raised if Spark fails.

    ``exit_code``: that of the cause if the cause is an error of this package; otherwise 4, because nothing was checked.
    """

    code = "spark_failed"

    def __init__(self, message: str, *, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Work(NamedTuple):
    """The Spark session and the progress display of a command."""

    spark: SparkSession
    stages: Stages


@contextmanager
def explain_missing_modules() -> Iterator[None]:
    """Turn the error about a missing module of the extra ``spark`` into an error that says how to install the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        raise ConfigurationError(
            f"the pipeline needs {name}: pip install 'taskqueue-backends[spark]'"
        ) from None


def check_installed() -> None:
    """Raise `ConfigurationError` if Spark is not installed."""
    with explain_missing_modules():
        importlib.import_module("pyspark")
        importlib.import_module("pyarrow")


@contextmanager
def work(options: EngineOptions, *, small: bool = False) -> Iterator[Work]:
    """Start Spark, and stop it at the end of the context. The output of Spark and Java goes to a temporary file.

    ``small``: there is little data, so Java should not spend time compiling; no effect if Spark may run on other
    machines. Raises `ConfigurationError`, and `SparkFailed` if Spark fails.
    """
    check_installed()
    with explain_missing_modules():
        from taskqueue_spark.session import SMALL_DATA, session  # noqa: PLC0415 - imports Spark, which is slow
    conf = (SMALL_DATA if small and not options.distributed else {}) | options.spark_settings
    with (
        tempfile.TemporaryDirectory(prefix="taskqueue-pipeline-") as folder,
        _open_stages() as stages,
    ):
        log = Path(folder) / "spark.log"
        logging.getLogger().addFilter(_not_of_py4j)
        with stages.stage("start Spark") as stage:
            with _failures(log), _quiet(log):
                spark = session("taskqueue pipeline", options.master, options.remote, **conf)
            stage.note = f"{spark.version} on {options.remote or options.master or 'this machine'}"
        stages.watch = partial(_progress, spark)
        try:
            with _failures(log), explain_missing_modules():
                yield Work(spark, stages)
        finally:
            stages.watch = lambda: None
            with _quiet(log), contextlib.suppress(Exception):
                spark.stop()


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Return false for a log record of py4j, which logs a traceback for every exception that it raises."""
    return "py4j" not in Path(record.pathname).parts


@contextmanager
def _open_stages() -> Iterator[Stages]:
    """Yield a display on stderr. For a terminal, duplicate stderr, so that `_quiet` does not redirect the display."""
    if not sys.stderr.isatty():
        yield Stages()
        return
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as terminal:
        yield Stages(SafeConsole(file=terminal))


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Redirect the stderr of this process, and of the processes that it starts in this context, to a file."""
    sys.stderr.flush()
    retained = os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(retained, 2)
        os.close(retained)
        os.close(target)


@contextmanager
def _failures(log: Path) -> Iterator[None]:
    """Turn Spark's errors into `SparkFailed` errors with one-line messages."""
    try:
        yield
    except (TaskQueueError, ModuleNotFoundError):
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark", "py4j", "grpc")):
            raise
        text = str(error)
        if "JAVA_GATEWAY" in text and log.exists():
            text = f"{log.read_text('utf-8', 'replace')[-_LOG_END:]}\n{text}"
        raise _error_of(text) from error


def _error_of(text: str) -> SparkFailed:
    """Return an error with a message from ``text``: this package's last error, else the last cause or first line."""
    if ours := _OURS.findall(text):
        name, message = ours[-1]
        kind = getattr(errors, name, TaskQueueError)
        # Only the class of an error decides the exit code, so the error needs no arguments here.
        return SparkFailed(message, exit_code=exit_code(kind.__new__(kind)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    results = (
        causes[-1:]
        or [line for line in lines if not line.startswith(_ASIDE)]
        or ["no reason given"]
    )
    return SparkFailed(f"Spark failed: {results[0]}")


def _progress(spark: SparkSession) -> Done | None:
    """Return Spark's progress; ``None`` if it is unknown, as with Spark Connect and after the end of the session."""
    with contextlib.suppress(Exception):
        tracker = spark.sparkContext.statusTracker()
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        known = [stage for stage in stages if stage is not None]
        total = sum(stage.numTasks for stage in known)
        return (sum(stage.numCompletedTasks for stage in known), total) if total else None
    return None
