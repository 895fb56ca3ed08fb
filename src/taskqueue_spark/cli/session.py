"""A Spark session for a command: started quietly, watched, and ended with it."""

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
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from taskqueue_cli.output import FAILED
from taskqueue_core import errors
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    InvalidInput,
    PublishUnconfirmed,
    TaskQueueError,
)
from taskqueue_spark.cli.options import Engine
from taskqueue_spark.cli.progress import Done, Stages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_EXTRA = {"google", "grpc", "hiredis", "jinja2", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}
_OURS = re.compile(r"taskqueue_core\.errors\.([A-Za-z]+): ([^\n]*)")
_CODES = {2: (ConfigurationError, InvalidInput), 4: (BackendUnavailable, PublishUnconfirmed)}
_ASIDE = ("WARN", "Using ", "Setting ", "To adjust ")
"""what Spark says whenever it starts"""
_LOG_END = 20_000


class SparkFailed(TaskQueueError):
    """Spark could not do it. ``exit_code`` is that of the error within, if it is one of this package's."""

    code = "spark_failed"

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Work:
    """A session, and who tells of it."""

    def __init__(self, spark: SparkSession, stages: Stages) -> None:
        self.spark = spark
        self.stages = stages


@contextmanager
def needed() -> Iterator[None]:
    """Tell what to install where a module of the extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        raise ConfigurationError(
            f"the pipeline needs {name}: pip install 'taskqueue-backends[spark]'"
        ) from None


def installed() -> None:
    """Raise `ConfigurationError` unless Spark is there to be started."""
    with needed():
        importlib.import_module("pyspark")
        importlib.import_module("pyarrow")


@contextmanager
def work(options: Engine, *, little: bool = False) -> Iterator[Work]:
    """Start Spark, and end it with the context. What it and its Java say goes to a file that is shown in an error.

    ``little``: there is so little to do that nothing is worth being compiled for it.
    Raises `ConfigurationError`, and `SparkFailed` for whatever fails within.
    """
    installed()
    with needed():
        from taskqueue_spark.session import SMALL_DATA, session  # noqa: PLC0415 - Spark takes its time
    conf = (SMALL_DATA if little and not options.elsewhere else {}) | options.conf
    with (
        tempfile.TemporaryDirectory(prefix="taskqueue-pipeline-") as folder,
        _reporting_to() as stages,
    ):
        log = Path(folder) / "spark.log"
        logging.getLogger().addFilter(_not_of_py4j)
        with stages.stage("start Spark") as stage:
            with _failures(log), _quiet(log):
                spark = session("taskqueue pipeline", options.master, options.remote, **conf)
            stage.note = f"{spark.version} at {options.remote or options.master or 'this machine'}"
        stages.watch = _watcher(spark)
        try:
            with _failures(log), needed():
                yield Work(spark, stages)
        finally:
            stages.watch = lambda: None
            with _quiet(log), contextlib.suppress(Exception):
                spark.stop()


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Keep py4j from logging traces of what it raises as well, such as a Ctrl-C."""
    return "py4j" not in Path(record.pathname).parts


@contextmanager
def _reporting_to() -> Iterator[Stages]:
    """Tell stages on stderr; where that is a terminal, on a way of its own that `_quiet` leaves alone."""
    if not sys.stderr.isatty():
        yield Stages()
        return
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as terminal:
        yield Stages(Console(file=terminal, highlight=False))


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Have what processes that are started here say on stderr go to a file, as long as they live."""
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
    """Turn Spark's errors into one line each."""
    try:
        yield
    except (TaskQueueError, ModuleNotFoundError):
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark", "py4j", "grpc")):
            raise
        text = f"{_end_of(log)}\n{error}" if "JAVA_GATEWAY" in str(error) else str(error)
        raise _error_of(text) from error


def _error_of(text: str) -> SparkFailed:
    """Return the error of ours that an error of Spark was made from, or else its first line."""
    if ours := _OURS.findall(text):
        name, said = ours[-1]
        kind = getattr(errors, name, TaskQueueError)
        code = next((code for code, kinds in _CODES.items() if issubclass(kind, kinds)), FAILED)
        return SparkFailed(said, exit_code=code)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    results = (
        causes[-1:]
        or [line for line in lines if not line.startswith(_ASIDE)]
        or ["no reason given"]
    )
    return SparkFailed(f"Spark failed: {results[0]}")


def _end_of(log: Path) -> str:
    try:
        return log.read_text("utf-8", "replace")[-_LOG_END:]
    except OSError:
        return ""


class _watcher:  # noqa: N801 - a function with something to remember
    """Says how far Spark is, where that can be asked: not over Connect."""

    def __init__(self, spark: SparkSession) -> None:
        self._tracker = None
        with contextlib.suppress(Exception):
            self._tracker = spark.sparkContext.statusTracker()

    def __call__(self) -> Done | None:
        if self._tracker is None:
            return None
        with contextlib.suppress(Exception):  # the session may be ending
            stages = map(self._tracker.getStageInfo, self._tracker.getActiveStageIds())
            known = [stage for stage in stages if stage is not None]
            total = sum(stage.numTasks for stage in known)
            return (sum(stage.numCompletedTasks for stage in known), total) if total else None
        return None
