"""The demo: a server, workers and a real job, with deliberate failures and a report at the end."""

from taskqueue_cli.demo.plan import DemoOptions
from taskqueue_cli.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
