"""The demo: it runs a server, workers and a job, causes failures on purpose, and prints a report at the end."""

from taskqueue_cli.demo.plan import DemoOptions
from taskqueue_cli.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
